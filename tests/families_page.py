"""`docs/families.md`, made of what the tests prove: `python tests/families_page.py` rewrites it."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path

# ruff: noqa: E501
from headwise.models.families.known_families import ARCHITECTURES, NOT_SEPARABLE
from tiny import COMMON, MORE, TINY

PAGE = Path(__file__).parent.parent / "docs" / "families.md"
OUTCOMES = Path(__file__).parent / "data" / "family_verbs.json"

# config entries -> what they try
SIGNS = {
    "sliding_window": "window",
    "attention_window_size": "window",
    "window_size": "window",
    "attention_chunk_size": "chunks",
    "num_key_value_heads": "shared keys",
    "clip_qkv": "clipped q, k, v",
    "attn_config": "clipped q, k, v",
    "qk_layernorm": "QK norm",
    "use_qk_norm": "QK norm",
    "attention_bias": "biases",
    "use_bias": "biases",
    "partial_rotary_factor": "partial rotary",
    "rotary_dim": "partial rotary",
    "no_rope_layers": "layers without RoPE",
    "num_experts": "experts",
    "moe_num_experts": "experts",
    "ffn_config": "experts",
    "final_logit_softcapping": "capped logits",
    "logits_soft_cap": "capped logits",
    "logit_scale": "scaled logits",
    "logits_scaling": "scaled logits",
    "lm_head_multiplier": "scaled logits",
    "kv_lora_rank": "latent keys and values",
    "multi_query": "one key head",
    "global_head_dim": "layers of two widths",
    "swa_num_key_value_heads": "layers with more keys",
}
HYBRIDS = {
    "lfm2",
    "lfm2_moe",
    "jamba",
    "nemotron_h",
    "granitemoehybrid",
    "bamba",
    "qwen3_next",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "minimax",
    "recurrent_gemma",
}
SINKS = {"gpt_oss", "granite_swa", "granitemoe_swa", "mimo_v2_flash"}

HEAD = """# Families

Made by `python tests/families_page.py` of the rows and the tiny models that the tests prove; a test compares.

Each of the {count} families below is proved on tiny random models in its odd shapes: noise in one head's weights moves that
head, or exactly its key/value group, and no other; every measure equals dense attention (first-token mass within 1e-5,
entropy within 1e-4 nats); the logits of the tapped model and of the loss path are the model's own within 1e-5 of their size,
past every window and chunk, with padding on both sides, for `sdpa` and `eager`. `headwise check MODEL` does the same with
the model at hand, on heads at both ends and in the middle of such layers and of one layer of every kind (`--all`: of all), and compares
the logits of some fifty positions, the last ones and others before them, where the vocabulary is large (`sampled` in `check.json` says
which); every verb compares one text before it starts.

A family that is not listed is not refused by its name: its heads are looked for by the names and sizes of its modules, and used
if the whole check passes on the model itself (`headwise check MODEL --write-row` prints the row).

Words: *latent*: queries, keys and values of a head are rows behind a shared compression; the rotary part of the key is one for all
heads and belongs to none, so surgery leaves it alone. *Gate*: contributions are read behind it; its own weights belong
to no slice. *Hybrid*: only some layers have attention; heads bear the model's own layer numbers. *Learned sink*: its share is a
measure of its own (`learned_sink_share`) and counts with the first token's mass in the classes. MLP dormancy is counted
where there is one MLP, not for experts.

| family | positions | tried | MLP dormancy |
|---|---|---|---|
"""

VERBS = """
## Every verb on every family

One tiny model of each family, every verb: it works (+) or is refused with the reason below the table; `make test-families`
runs all of them and accepts nothing else. `release`, `centre` and `lora` are `repair --treatment release`, `--treatment centre`
and `--mode lora`; `repair` is the surgery; `apply` is merged, undone and compared bit for bit; `--stream` is a diagnosis of a
model that stays on disk. Refused families are not in the table.

"""

REFUSED = """
## Refused, with the reason

| families | why |
|---|---|
"""


PACKED = """
## Half precision and quantised weights

float16 and bfloat16 directories load as float32 on a CPU (`--dtype` asks for another), and train through float32 masters. GGUF files are
de-quantised to float32; tiny llamas in F32, F16, BF16, Q8_0, Q5_0, Q5_1, Q4_0 and Q4_1 come back as what was written
(`tests/test_gguf.py`). Projections that stay packed are read through what they compute: `diagnose`, `evaluate`, `capture` and
`complete` work, `check`, `triage`, `repair` and `apply` are refused before anything is written, with the way out (operate on the float checkpoint,
then quantise). The first-order estimate is left out of their evaluation, because packed kernels may pass no gradient on.

| library | version | tiny llama on a CPU |
|---|---|---|
| torchao, int8 weights | 0.18.0 | reads, refuses operations |
| bitsandbytes, 8 and 4 bits | 0.50.2 | reads, refuses operations |
| GPTQ (gptqmodel, with optimum) | 7.7.0 | reads, refuses operations |
| optimum-quanto | 0.2.7 | not tried: transformers does not save such a model |
| compressed-tensors | 0.20.0 | not tried: transformers wants a checkpoint that is quantised already |
| HQQ | 0.2.8 | not tried: this transformers does not load it |

Tried by hand on 2026-11-18, in an environment apart; the tests have a stand-in with whole numbers in buffers (`tests/test_strange_inputs.py`).
"""


def tried(family: str) -> str:
    """The odd things about a family and its tiny models."""
    row = ARCHITECTURES[family]
    found = {"hybrid"} if family in HYBRIDS else set()
    found |= {"gate"} if row.gated else set()
    found |= {"learned sink"} if family in SINKS else set()
    for model_type, extra in (TINY | MORE).values():
        if model_type == family:
            found |= {word for name, word in SIGNS.items() if extra.get(name)}
            if extra.get("num_key_value_heads") == COMMON["num_attention_heads"]:
                found -= {"shared keys"}
            width = COMMON["hidden_size"] // COMMON["num_attention_heads"]
            found |= {"wide heads"} if extra.get("head_dim", width) > width else set()
    return ", ".join(sorted(found)) or "plain"


def verb_table() -> str:
    """A row for each family, a column for each verb, and the reasons of refusals."""
    known = json.loads(OUTCOMES.read_text())
    verbs = list(next(iter(known.values()), {}))
    reasons: dict[str, str] = {}
    lines = [f"| family | {' | '.join(verbs)} |\n", "|---" * (len(verbs) + 1) + "|\n"]
    for family, outcomes in known.items():
        cells = []
        for verb in verbs:
            reason = outcomes[verb].replace(f"{family!r} ", "")
            reason = re.sub(r"no tensor that is \S+", "no tensor of a name in the model", reason)
            mark = reasons.setdefault(reason, str(len(reasons) + 1)) if reason != "works" else "+"
            cells.append(mark)
        lines.append(f"| {family} | {' | '.join(cells)} |\n")
    lines.append("\n")
    return "".join([*lines, *(f"{mark}. {reason}\n" for reason, mark in reasons.items())])


def page() -> str:
    """The whole page."""
    lines = [HEAD.format(count=len(ARCHITECTURES))]
    for family in sorted(ARCHITECTURES):
        row = ARCHITECTURES[family]
        positions = f"{row.positions} or alibi" if row.alibi_if else row.positions
        dormancy = "yes" if row.mlp_in else "-"
        lines.append(f"| {family} | {positions} | {tried(family)} | {dormancy} |\n")
    lines += [VERBS, verb_table(), REFUSED]
    reasons = defaultdict(list)
    for family, reason in NOT_SEPARABLE.items():
        reasons[reason].append(family)
    lines += [f"| {', '.join(names)} | {reason} |\n" for reason, names in reasons.items()]
    return "".join([*lines, PACKED])


if __name__ == "__main__":
    PAGE.write_text(page())
