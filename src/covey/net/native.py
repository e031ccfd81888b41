"""Which executor this process uses: the compiled one or Python, also between hosts."""

from __future__ import annotations

from functools import cache

from covey.base.native import native


@cache
def native_crypto() -> str:
    """Find libcrypto for sealed lanes, and return "", or return why they are sealed by Python."""
    module = native().module
    if module is None:
        return native().why_not
    try:
        import _ssl

        module.load_crypto(getattr(_ssl, "__file__", "") or "")
    except (ImportError, OSError) as error:
        return f"libcrypto was not found ({error})"
    return ""


def describe_executor() -> str:
    """Return which executor this process uses, as people read it."""
    why_not = native().why_not
    if why_not:
        return f"Python, because {why_not}"
    why_not = native_crypto()
    return "compiled" + (f"; Python between hosts, because {why_not}" if why_not else "")
