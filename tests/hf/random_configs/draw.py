"""Draws what families have in common: sizes, rotary positions, windows, experts, each in old and new spellings of config.json."""

from __future__ import annotations

import random
from typing import Any

FULL, SLIDING, LINEAR, CHUNKED = "full_attention", "sliding_attention", "linear_attention", "chunked_attention"
NO_IDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
Config = dict[str, Any]


class Draw:
    """Random choices of one case."""

    def __init__(self, seed: str) -> None:
        self.random = random.Random(seed)

    def one_of(self, *values: Any) -> Any:
        return self.random.choice(values)

    def chance(self, share: float) -> bool:
        return self.random.random() < share

    def options(self, config: Config, share: float = 0.4, **values: tuple[Any, ...]) -> None:
        """Sets some of the keys, each to one of its values."""
        config |= {key: self.one_of(*choices) for key, choices in values.items() if self.chance(share)}

    def kinds(self, config: Config, *kinds: str) -> list[str]:
        """A kind for every layer."""
        return [self.one_of(*kinds) for _ in range(config["num_hidden_layers"])]


def sizes(draw: Draw, *, epsilon: str = "rms_norm_eps", head_dim: bool = True, any_width: bool = False) -> Config:
    """Heads that share keys in any way, of their own width in some; widths and vocabularies that nothing divides."""
    heads = draw.one_of(1, 2, 3, 4, 6)
    shared = draw.one_of(*(count for count in range(1, heads + 1) if heads % count == 0))
    config: Config = {
        "vocab_size": draw.one_of(53, 61, 64, 97),
        "hidden_size": heads * draw.one_of(8, 16),
        "intermediate_size": draw.one_of(24, 37, 64),
        "num_hidden_layers": draw.one_of(1, 2, 3),
        "num_attention_heads": heads,
        "num_key_value_heads": shared,
        "max_position_embeddings": draw.one_of(64, 96),
        **NO_IDS,
    }
    if head_dim:
        config["head_dim"] = draw.one_of(8, 10, 16, 20) if draw.chance(0.6) else config["hidden_size"] // heads
        config["hidden_size"] += draw.one_of(0, 2) if any_width else 0
    draw.options(config, tie_word_embeddings=(True, False), attention_dropout=(0.0, 0.1))
    config |= {epsilon: draw.one_of(1e-6, 1e-3)} if draw.chance(0.4) else {}
    draw.options(config, torch_dtype=("float32", "bfloat16"), dtype=("float32",), use_cache=(True, False))
    return config


def unset_sizes(draw: Draw, config: Config) -> None:
    """Leaves out, or sets to null, what the other sizes say."""
    if config["num_key_value_heads"] == config["num_attention_heads"] and draw.chance(0.5):
        config["num_key_value_heads"] = None
        if draw.chance(0.5):
            del config["num_key_value_heads"]
    if config.get("head_dim") == config["hidden_size"] // config["num_attention_heads"] and draw.chance(0.5):
        config["head_dim"] = None


def scaling(draw: Draw, width: int, *kinds: str) -> Config:
    """A table of rotary scaling; `width` channels of a head are rotated."""
    kind = draw.one_of(*kinds)
    table: Config = {"rope_type": kind}
    if kind == "linear":
        table["factor"] = draw.one_of(2.5, 4)
    if kind == "yarn":
        table |= {"factor": draw.one_of(2.0, 16), "original_max_position_embeddings": draw.one_of(16, 32)}
        draw.options(table, beta_fast=(32, 4.0), beta_slow=(1, 2.0))
        temperatures: tuple[Config, ...] = ({}, {"attention_factor": 1.3}, {"mscale": 0.8, "mscale_all_dim": 0.4})
        table |= draw.one_of(*temperatures)
    if kind == "llama3":
        table |= {"factor": draw.one_of(4.0, 32), "low_freq_factor": 1, "high_freq_factor": 4.0}
        table["original_max_position_embeddings"] = draw.one_of(16, 32)
    if kind == "longrope":
        pairs = width // 2
        table |= {"short_factor": [1 + 0.1 * pair for pair in range(pairs)], "long_factor": [2.0] * pairs}
        table["original_max_position_embeddings"] = 64
    return table


KINDS = ("default", "linear", "yarn", "llama3", "longrope")


def rope(draw: Draw, config: Config, *kinds: str, part: float | None = None, width: int | None = None) -> Config:
    """Rotary positions in the spelling of transformers 5, in that before it, or in none; `part`: of a head, by default."""
    given = draw.one_of(0.25, 0.5, 1.0) if part is not None and draw.chance(0.5) else None
    rotated = width or config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    rotated = int(rotated * (part if given is None else given)) if part is not None else rotated
    table, theta = scaling(draw, rotated, *(kinds or KINDS)), draw.one_of(100.0, 10000, 1e6)
    more = {} if given is None else {"partial_rotary_factor": given}
    spelling = draw.one_of("new", "old", "none")
    if spelling == "new":
        return config | {"rope_parameters": {**table, "rope_theta": theta, **more}}
    if spelling == "none":
        return config | more
    if draw.chance(0.5):
        table["type"] = table.pop("rope_type")
    scaled = None if "default" in table.values() else table
    return config | {"rope_theta": theta, "rope_scaling": scaled, **more}


def rope_by_kinds(draw: Draw, config: Config, local_key: str = "") -> Config:
    """The same where layers with a window have settings of their own, which are not scaled."""
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    table, theta = scaling(draw, width, *KINDS), draw.one_of(100.0, 10000.0)
    local = {"rope_type": "default", "rope_theta": draw.one_of(50.0, 500.0)}
    if draw.chance(0.6):
        return config | {"rope_parameters": {FULL: {**table, "rope_theta": theta}, SLIDING: local}}
    old = {"rope_theta": theta, local_key: local["rope_theta"]} if local_key else {}
    return config | old | {"rope_scaling": None if table["rope_type"] == "default" else table}


def windows(draw: Draw, config: Config, *, kinds: bool = True) -> None:
    draw.options(config, 0.7, sliding_window=(1, 3, 8))
    if kinds and draw.chance(0.5):
        config["layer_types"] = draw.kinds(config, FULL, SLIDING)


def biases(draw: Draw, config: Config) -> None:
    """Everywhere or nowhere."""
    if draw.chance(0.5):
        config["attention_bias"] = config["mlp_bias"] = draw.one_of(True, False)


def experts(draw: Draw, config: Config, count_key: str = "num_experts", topk_key: str = "num_experts_per_tok") -> None:
    config[count_key] = draw.one_of(2, 3, 8)
    config[topk_key] = draw.random.randint(1, config[count_key])


def grouped_experts(draw: Draw, config: Config, names: dict[str, str] | None = None) -> None:
    """Experts in groups of which a token chooses some, as in DeepSeek; `names`: other names of keys."""
    groups, per_group = draw.one_of(1, 2, 4), draw.one_of(2, 4)
    chosen = draw.random.randint(1, groups)
    found = {"n_routed_experts": groups * per_group, "n_group": groups, "topk_group": chosen}
    found["num_experts_per_tok"] = draw.random.randint(2, chosen * per_group)
    draw.options(found, n_shared_experts=(1, 2), routed_scaling_factor=(1.0, 1.7))
    config |= {(names or {}).get(key, key): value for key, value in found.items()}
    config["moe_intermediate_size"] = draw.one_of(12, 24)


def latent_attention(draw: Draw, config: Config) -> None:
    config |= {
        "kv_lora_rank": 12,
        "q_lora_rank": draw.one_of(None, 10),
        "num_key_value_heads": config["num_attention_heads"],
    }
    config |= {
        "qk_nope_head_dim": draw.one_of(4, 6),
        "qk_rope_head_dim": draw.one_of(4, 8),
        "v_head_dim": draw.one_of(4, 7),
    }
    config["first_k_dense_replace"] = draw.random.randrange(config["num_hidden_layers"])


def mamba(draw: Draw, width: int, names: dict[str, str]) -> Config:
    """Sizes of Mamba-2 layers; `names`: of their keys."""
    expand = draw.one_of(1, 2)
    heads = draw.one_of(*(count for count in (1, 2, 4, 8) if width * expand % count == 0))
    found = {"heads": heads, "head_dim": width * expand // heads, "expand": expand, "state": draw.one_of(4, 6)}
    found |= {
        "groups": draw.one_of(*(count for count in (1, 2, 4) if heads % count == 0)),
        "chunk": draw.one_of(4, 256),
    }
    return {names[name]: value for name, value in found.items() if name in names}
