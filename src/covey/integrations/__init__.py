"""covey under libraries that train models: `lightning`, `accelerate` and `transformers`, each loaded by its name."""
