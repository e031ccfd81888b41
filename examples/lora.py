"""Fine-tune a small language model with LoRA: `covey run lora.py` on each machine, or `covey run -n 2 lora.py`.

The base model is made on the spot: it reads a few chapters of prose, which come with covey, byte by byte. Then it is
frozen, and small adapters beside its matrices learn to write sonnets, or what is in `--text FILE`. A step sends the
gradients of the adapters, and nothing else. Machines may leave and come back; each saves the adapters in `--folder`,
and starts from there.
"""

import argparse
import os
from importlib import resources
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.nn.utils.parametrize import register_parametrization

import covey.torch

CONTEXT, WIDTH, HEADS, LAYERS, BATCH, RANK = 64, 64, 4, 2, 32, 8


class Model(nn.Module):
    """Returns, for each byte of each line, the logits of the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.byte, self.place = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, 0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, LAYERS, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        length = codes.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        x = self.byte(codes) + self.place(torch.arange(length))
        return self.head(self.layers(x, mask, is_causal=True))


class LoRA(nn.Module):
    """A change of a frozen matrix that has few parameters: the product of two thin matrices, zero at first."""

    def __init__(self, matrix: torch.Tensor) -> None:
        super().__init__()
        rows, columns = matrix.shape
        self.down = nn.Parameter(torch.randn(RANK, columns) / columns**0.5)
        self.up = nn.Parameter(torch.zeros(rows, RANK))

    def forward(self, matrix: torch.Tensor) -> torch.Tensor:
        return matrix + self.up @ self.down


def adapted(model: Model) -> nn.ModuleList:
    """Freeze a model, put an adapter beside each matrix of its layers, and return the adapters."""
    model.requires_grad_(requires_grad=False)
    names = [name for name, value in model.layers.named_parameters() if value.dim() == 2]
    for path, _, name in (name.rpartition(".") for name in names):
        module = model.layers.get_submodule(path)
        register_parametrization(module, name, LoRA(getattr(module, name)))
    return nn.ModuleList(module for module in model.modules() if isinstance(module, LoRA))


def lines_of(text: bytes) -> torch.Tensor:
    """Return a text as rows of CONTEXT bytes and the byte after them; each row begins half a row after the last."""
    codes = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    return codes.unfold(0, CONTEXT + 1, CONTEXT // 2)


def loss_of(model: Model, lines: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(lines[:, :-1]).flatten(0, 1), lines[:, 1:].flatten())


def train_base(model: Model, steps: int) -> None:
    """Let the model read prose: what somebody else has done for a model that you have downloaded."""
    lines = lines_of(resources.files("covey.lab.demo").joinpath("text.txt").read_bytes())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model, lines[torch.randint(len(lines), (BATCH,))]).backward()
        optimizer.step()


@torch.no_grad()
def write(model: Model, length: int = 160) -> str:
    """Return text that the model samples one byte at a time."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.tensor([list(b"\n")])
    for _ in range(length):
        chances = (model(codes[:, -CONTEXT:])[0, -1] / 0.7).softmax(-1)
        codes = torch.cat([codes, torch.multinomial(chances, 1, generator=generator).unsqueeze(0)], dim=1)
    return bytes(codes[0].tolist()).decode(errors="replace").strip()


def base_model(folder: Path, steps: int) -> Model:
    """Return the base model of a folder; make it if there is none."""
    model, file = Model(), folder / "base.pt"
    if file.exists():
        model.load_state_dict(torch.load(file))
        return model
    print(f"makes a base model, in {steps} steps", flush=True)
    train_base(model, steps)
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), made := folder / f"base.{os.getpid()}")
    made.replace(file)  # whole, or not at all
    return model


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--text", type=Path, default=Path(__file__).parent / "data" / "sonnets.txt")
    parser.add_argument("--folder", type=Path, default=Path("lora"), help="where base and adapters are saved")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--base-steps", type=int, default=300)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)

    model = base_model(args.folder, args.base_steps)
    lines = lines_of(args.text.read_bytes())

    @torch.no_grad()
    def loss_now() -> float:
        return loss_of(model, lines[:200]).item()

    before = loss_now()
    adapters = adapted(model)
    optimizer = torch.optim.AdamW(adapters.parameters(), lr=1e-2)
    elastic = covey.torch.Elastic(
        model=model,
        optimizer=optimizer,
        sampler=covey.torch.ElasticSampler(len(lines)),
        batch=BATCH,  # of all machines together
        epochs=args.epochs,
    )
    state = {"adapters": adapters, "optimizer": optimizer, "elastic": elastic}
    if any(args.folder.glob("step-*")):
        covey.torch.load(state, args.folder)
        print(f"continues after {elastic.samples} lines")

    def save() -> None:
        if elastic.group.local_rank == 0:  # one process of each machine
            covey.torch.save(state, args.folder, step=elastic.samples).wait()

    whole, few = (sum(each.numel() for each in part.parameters()) for part in (model, adapters))
    generation, epoch = -1, elastic.epoch
    for indices in elastic:  # this machine's share of the next 32 lines
        if elastic.generation != generation:
            generation = elastic.generation
            print(f"rank {elastic.rank} of {elastic.size}: trains and sends {few} of {whole} parameters", flush=True)
            if elastic.is_first:
                print(f"The model writes:\n{write(model)}\n", flush=True)
        if elastic.epoch != epoch:
            epoch = elastic.epoch
            save()
            if elastic.is_first:
                print(f"epoch {epoch}   loss {loss_now():.3f}   ranks {len(elastic.group.live)}", flush=True)
        loss = loss_of(model, lines[indices])
        loss.backward()
        elastic.step()
        elastic.group.report(step=elastic.samples // BATCH, loss=loss.item(), samples=len(indices))

    if not elastic.done:
        return  # SIGTERM asked this process to leave
    save()
    after = loss_now()
    if elastic.is_first:
        print(f"epoch {elastic.epoch}   loss {after:.3f}, and {before:.3f} without the adapters")
        print(f"The model writes:\n{write(model)}")
    if after >= before:
        raise SystemExit("the loss did not fall")


if __name__ == "__main__":
    main()
