"""A tiny GPT: `covey run -n 2 examples/gpt.py`, or `torchrun --nproc-per-node 2`, or `python` alone.

It is trained on some of Shakespeare's sonnets, character by character, and prints generated lines before and after.
`--fsdp` shards the model instead of copying it to every rank; with `--steps 1000` it generates words; `--text FILE`
trains on another text.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

CONTEXT, WIDTH, HEADS, LAYERS, BATCH = 64, 64, 4, 2, 32


class Block(nn.Module):
    """A transformer block: causal attention, then an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.before_looking, self.before_thinking = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query_key_value, self.mix = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.think = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        heads = self.query_key_value(self.before_looking(x)).view(batch, length, 3, HEADS, WIDTH // HEADS)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.mix(seen.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.think(self.before_thinking(x))


class GPT(nn.Module):
    """Returns, for each character of each line, the logits of the next one."""

    def __init__(self, letters: int) -> None:
        super().__init__()
        self.letter, self.place = nn.Embedding(letters, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, letters)

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        x = self.letter(codes) + self.place(torch.arange(codes.shape[1]))
        return self.head(self.norm(self.blocks(x)).flatten(0, 1))


@torch.no_grad()
def write(model: nn.Module, letters: list[str], length: int = 120) -> str:
    """Return text that the model samples one character at a time; all ranks sample the same."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.tensor([[letters.index("\n")]])
    for _ in range(length):
        chances = (model(codes[:, -CONTEXT:])[-1] / 0.8).softmax(-1)
        codes = torch.cat([codes, torch.multinomial(chances, 1, generator=generator).unsqueeze(0)], dim=1)
    return "".join(letters[code] for code in codes[0]).strip()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--fsdp", action="store_true")
    parser.add_argument("--text", type=Path, default=Path(__file__).parent / "data" / "sonnets.txt")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)

    dist.init_process_group("covey", init_method="covey://")
    rank, size = dist.get_rank(), dist.get_world_size()
    text = args.text.read_text(encoding="utf-8")
    letters = sorted(set(text))
    codes = torch.tensor([letters.index(letter) for letter in text])

    gpt = GPT(len(letters))
    count = sum(parameter.numel() for parameter in gpt.parameters())
    model: nn.Module = gpt
    if args.fsdp:
        for block in gpt.blocks:
            fully_shard(block)
        fully_shard(gpt)
    else:
        model = DistributedDataParallel(gpt)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    draft = write(gpt, letters)
    if rank == 0:
        print(f"ranks: {size}, parameters: {count}, letters to read: {len(codes)}. Before:\n{draft}\n")

    generator = torch.Generator().manual_seed(rank)  # every rank reads different lines
    losses = []
    for step in range(args.steps):
        starts = torch.randint(len(codes) - CONTEXT - 1, (max(1, BATCH // size), 1), generator=generator)
        lines = codes[starts + torch.arange(CONTEXT + 1)]
        loss = F.cross_entropy(model(lines[:, :-1]), lines[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach()
        dist.all_reduce(mean, dist.ReduceOp.AVG)
        losses.append(mean.item())
        if rank == 0 and (step % 25 == 0 or step == args.steps - 1):
            print(f"step {step:4}   loss {losses[-1]:.3f}")

    poem = write(gpt, letters)
    if rank == 0:
        print(f"\nAfter:\n{poem}")
    dist.destroy_process_group()
    if losses[-1] > 0.8 * losses[0]:
        raise SystemExit("the loss did not fall")


if __name__ == "__main__":
    main()
