"""States of recurrent layers in bfloat16 beside float32: how far the next token diverges.

`transformers`' own modules decode the same tokens twice; one side's recurrent states are rounded
behind every token, or behind every step only. No trained hybrid is at hand. Random weights forget
within a token, so each head's decay is drawn anew: half-lives from `--half-lives`, evenly on a
logarithmic scale, which is where rounding adds up. Logits are scaled to an entropy of `--nats`.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from beamwright.models.linear import quiet_import
from beamwright_lab.common import finish, say, table

_SIZES = {
    **{"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 8, "vocab_size": 4096},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64},
    **{"linear_num_key_heads": 4, "linear_num_value_heads": 8},
}
"""Heads' states have the 128 x 128 values of the published models."""


def model_of(half_lives: tuple[float, float], seed: int) -> Any:
    """A Qwen3.5 with heads that remember."""
    with quiet_import():
        from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    config = AutoConfig.for_model("qwen3_5_text", **_SIZES)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    least, most = map(math.log, half_lives)
    for name, weight in model.named_parameters():
        if name.endswith("A_log"):  # the decay of a token is exp(-A softplus(input + bias))
            lives = torch.exp(torch.empty_like(weight).uniform_(least, most))
            weight.data = -torch.log(lives)  # softplus(0) is ln 2
        if name.endswith("dt_bias"):
            weight.data.zero_()
    return model


@torch.inference_mode()
def logits_of(model: Any, ids: Tensor, every: int | None) -> Tensor:
    """Next-token logits [tokens, vocab] of rows [rows, tokens] decoded token by token.

    every: recurrent states are rounded to bfloat16 behind so many tokens; None: never.
    """
    with quiet_import():
        from transformers import DynamicCache

    cache, found = DynamicCache(config=model.config), []
    for at in range(ids.shape[1]):
        out = model(ids[:, at : at + 1], past_key_values=cache, use_cache=True)
        found.append(out.logits[:, -1])
        if every is not None and (at + 1) % every == 0:
            for layer in cache.layers:
                states = getattr(layer, "recurrent_states", {})
                for number, state in states.items():
                    if state is not None:
                        states[number] = state.to(torch.bfloat16).to(state.dtype)
    return torch.stack(found, 1)


def rows_of(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    model = model_of((args.half_lives[0], args.half_lives[1]), args.seed)
    generator = torch.Generator().manual_seed(args.seed)
    ids = torch.randint(model.config.vocab_size, (args.rows, args.tokens), generator=generator)
    plain = logits_of(model, ids, None).double()
    scale = _scale_of(plain, args.nats)
    full = torch.log_softmax(scale * plain, -1)
    entropy = float(-(full.exp() * full).sum(-1).mean())
    say(f"entropy {entropy:.2f} nats")
    for name, every in (("every token", 1), (f"every {args.step} tokens", args.step)):
        other = torch.log_softmax(scale * logits_of(model, ids, every).double(), -1)
        kl = (full.exp() * (full - other)).sum(-1).mean(0)  # by place
        last = kl[-args.tokens // 4 :]
        same = (full.argmax(-1) == other.argmax(-1)).double().mean()
        yield {
            "rounded": name,
            "mean_kl": float(kl.mean()),
            "mean_kl_first_quarter": float(kl[: args.tokens // 4].mean()),
            "mean_kl_last_quarter": float(last.mean()),
            "most_kl_of_a_place": float(kl.max()),
            "same_likeliest": float(same),
            "entropy": entropy,
        }


def _scale_of(logits: Tensor, nats: float) -> float:
    """By which logits have this entropy in the mean."""
    low, high = 0.01, 1000.0
    for _ in range(40):
        middle = math.sqrt(low * high)
        logs = torch.log_softmax(middle * logits, -1)
        entropy = float(-(logs.exp() * logs).sum(-1).mean())
        low, high = (middle, high) if entropy > nats else (low, middle)
    return low


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--step", type=int, default=64)
    parser.add_argument("--nats", type=float, default=1.0)
    parser.add_argument("--half-lives", type=float, nargs=2, default=[1.0, 4096.0])
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rows = list(rows_of(args))
    shown = [{k: f"{v:.2g}" if isinstance(v, float) else v for k, v in row.items()} for row in rows]
    print(table(shown, list(shown[0])), end="\n\n")
    finish("state_bits", {"settings": vars(args), "rows": rows})


if __name__ == "__main__":
    main()
