"""How one request is continued: what may be drawn, when it ends, and what is reported of each token.

What a request does not say, the generation_config.json that a model came with may: its sampling parameters alone are taken, as other
servers do, since its makers recommend them. Ids that end an answer are read beside (`serve/open_engine.py`); a length is for a request to
say.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from petatron.base.errors import CheckpointError, ConfigError, Problem
from petatron.base.log import get_logger
from petatron.base.model_companion_files import read_companion_file
from petatron.config.schema.sections.task_head import PoolingName

GENERATION_CONFIG_FILE = "generation_config.json"
_log = get_logger(__name__)
MAX_TOP_LOGPROBS = 100
"""The most alternatives reported of one token."""
MAX_SEED, MAX_TOP_K = 2**63 - 1, 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """The text must be a word of a language (`infer/constrained_decoding.py`).

    kind: a JSON schema, a regular expression, any JSON object, or a context-free grammar in Lark's notation, or in that of GBNF and EBNF
    (`root ::= ...`). whitespace: of JSON, a regular expression for what may be between its parts; None: nothing, JSON is compact.
    """

    kind: Literal["json_schema", "regex", "json", "grammar"]
    grammar: str = ""
    whitespace: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Immutable, checked, and plain data: it is sent to every rank as JSON.

    max_new_tokens: at most so many; 0 only reports on the prompt.
    temperature: divides the logits; 0 is greedy.
    top_k: the k most likely ids; then top_p: the smallest set of the most likely ones with at least this probability; then min_p:
        those at least this probable relative to the most likely one. None keeps all.
    top_p_decay, top_p_bound: top_p is multiplied by the first after every new token, down to the second.
    repetition_penalty: divides positive logits of ids in the prompt or answer, and multiplies negative ones.
    presence_penalty, frequency_penalty: subtracted once, and once per use, for ids in the answer.
    logit_bias: added to the logits of ids.
    allowed_ids: no other id may be drawn; None allows all.
    bad_words_ids: of each of these, the last id may not be drawn after the others; an answer never contains one of them.
    seed, sample: draws are a function of (seed, sample, position), whatever shares the batch.
    stop_ids, stop_strings: the request ends after such an id, and before such a text, which is cut off unless keep_stop is set.
    hidden_ids: have no place in the answer's text.
    wants_text: whether ids become text as they come; without, an answer has text only if stop_strings look for theirs in it.
    min_new_tokens: no stop id may be drawn before.
    logprobs, prompt_logprobs: how many alternatives to report beside each new or prompt token; 0: its own log-probability alone;
        None: nothing. They are those of the model, before temperature, penalties and filters.
    policy_logprobs: those of new tokens are of the distribution at this temperature instead, before filters, with the probability that
        filters kept; for training on the tokens (`kernels/policy_log_probs.py`).
    pooling: returns one vector of the prompt's last hidden states instead of new tokens.
    best_items, history_times, leave_out_history: of a recommender: so many items that follow best after the prompt, which is a history,
        with the times of its items in seconds if the model reads them; whether items of the history are left out.
    prefix_group: equal beginnings of prompts are computed once among requests of one group; "": of those that name none.
    adapter: the name of the adapter that computes the answer, of those that the engine has; "": none.
    owner: who asks; slots, pages and tokens of steps are shared equally among owners that want them (`fair_share_queue.py`).
    """

    max_new_tokens: int = 16
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    top_p_decay: float = 1.0
    top_p_bound: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_ids: tuple[int, ...] | None = None
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    seed: int = 0
    sample: int = 0
    stop_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    keep_stop: bool = False
    hidden_ids: tuple[int, ...] = ()
    wants_text: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    policy_logprobs: bool = False
    pooling: PoolingName | None = None
    best_items: int | None = None
    history_times: tuple[int, ...] = ()
    leave_out_history: bool = True
    constraint: Constraint | None = None
    prefix_group: str = ""
    owner: str = ""
    adapter: str = ""

    def __post_init__(self) -> None:
        if problems := list(self._problems()):
            raise ConfigError(problems)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Returns the parameters that `asdict` and JSON made of some: keys of objects became texts, and tuples lists.

        >>> import dataclasses, json
        >>> params = SamplingParams(logit_bias={5: 1.0}, stop_ids=(3,), constraint=Constraint(kind="json"))
        >>> SamplingParams.from_json(json.loads(json.dumps(dataclasses.asdict(params)))) == params
        True
        """
        constraint, allowed = values["constraint"], values["allowed_ids"]
        changed = {
            "logit_bias": {int(token): bias for token, bias in values["logit_bias"].items()},
            "allowed_ids": None if allowed is None else tuple(allowed),
            "bad_words_ids": tuple(tuple(word) for word in values["bad_words_ids"]),
            "stop_ids": tuple(values["stop_ids"]),
            "history_times": tuple(values["history_times"]),
            "hidden_ids": tuple(values["hidden_ids"]),
            "stop_strings": tuple(values["stop_strings"]),
            "constraint": None if constraint is None else Constraint(**constraint),
        }
        return cls(**{**values, **changed})

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def _keeps_distribution(self) -> bool:
        """Whether nothing but temperature and filters changes the distribution that tokens are drawn from."""
        penalties = self.repetition_penalty != 1.0 or self.presence_penalty or self.frequency_penalty
        others = self.logit_bias or self.bad_words_ids or self.min_new_tokens or self.constraint
        return not (penalties or others or self.allowed_ids is not None)

    def _problems(self) -> list[Problem]:
        least_holds = 0 <= self.min_new_tokens <= max(0, self.max_new_tokens)
        top_k_holds = self.top_k is None or 1 <= self.top_k <= MAX_TOP_K
        top_p_holds = self.top_p is None or 0 < self.top_p <= 1
        min_p_holds = self.min_p is None or 0 <= self.min_p <= 1
        biases_hold = all(map(math.isfinite, self.logit_bias.values()))
        top_k_fix = f"Use 1 to {MAX_TOP_K}, or leave it out for all."
        count_fix = f"Use 0 to {MAX_TOP_LOGPROBS}, or leave it out."
        checks = (
            ("max_new_tokens", self.max_new_tokens >= 0, "is negative", "Ask for one token or more."),
            ("min_new_tokens", least_holds, "is not between 0 and max_new_tokens", "Use a number between."),
            ("temperature", 0 <= self.temperature < math.inf, "is not 0 or above", "0 is greedy, 1 the model's own."),
            ("top_k", top_k_holds, "keeps no id, or more than there are", top_k_fix),
            ("top_p", top_p_holds, "is not a share", "Use a number above 0 and up to 1, or leave it out."),
            ("min_p", min_p_holds, "is not a share", "Use a number from 0 to 1, or leave it out."),
            ("top_p_decay", 0 < self.top_p_decay <= 1, "is not a factor", "Use a number above 0 and up to 1."),
            ("top_p_bound", 0 <= self.top_p_bound <= 1, "is not a share", "Use a number from 0 to 1."),
            ("repetition_penalty", 0 < self.repetition_penalty < math.inf, "is not above 0", "1 changes nothing."),
            ("presence_penalty", math.isfinite(self.presence_penalty), "is not finite", "0 changes nothing."),
            ("frequency_penalty", math.isfinite(self.frequency_penalty), "is not finite", "0 changes nothing."),
            ("logit_bias", biases_hold, "is not finite", "Use finite numbers."),
            ("seed", 0 <= self.seed <= MAX_SEED, "is not a seed", f"Use a number from 0 to {MAX_SEED}."),
            ("logprobs", _is_count(self.logprobs), "is too many or negative", count_fix),
            ("prompt_logprobs", _is_count(self.prompt_logprobs), "is too many or negative", count_fix),
            ("allowed_ids", self.allowed_ids != (), "allows no id", "Name one or more, or leave it out for all."),
            ("bad_words_ids", all(self.bad_words_ids), "has an empty word", "Leave it out."),
            (
                "best_items",
                self.best_items is None or self.best_items > 0,
                "is not a number of items",
                "Use 1 or more.",
            ),
            ("policy_logprobs", not self.policy_logprobs or self._keeps_distribution, *_POLICY_RULE),
            ("stop_strings", all(self.stop_strings), "has an empty text", "Leave it out."),
        )
        return [Problem(name, str(getattr(self, name)), rule, fix) for name, holds, rule, fix in checks if not holds]


def _is_count(value: int | None) -> bool:
    return value is None or 0 <= value <= MAX_TOP_LOGPROBS


_POLICY_RULE = (
    "reports a distribution that penalties, biases, constraints or a least number of tokens change, which training does not compute",
    "Leave those out.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """None: the file does not say."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    def given(self) -> dict[str, float]:
        return {default.name: value for default in fields(self) if (value := getattr(self, default.name)) is not None}

    def as_params(self) -> dict[str, float]:
        """Returns the fields of `SamplingParams` that it sets: top_k 0 or below keeps all, which is None there, and the default."""
        return {name: value for name, value in self.given().items() if name != "top_k" or value > 0}

    @classmethod
    def from_values(cls, values: Mapping[str, object]) -> SamplingDefaults:
        """Returns those of a generation_config.json; a value that no request could have is left out, with a warning.

        >>> SamplingDefaults.from_values({"temperature": 0.6, "top_k": 20, "top_p": 7, "do_sample": True}).given()
        {'temperature': 0.6, 'top_k': 20}
        """
        defaults: dict[str, float] = {}
        for name, holds in _RANGES.items():
            value = values.get(name)
            if value is None:
                continue
            is_integer = name == "top_k"
            number = isinstance(value, int if is_integer else int | float) and not isinstance(value, bool)
            if number and math.isfinite(value) and holds(value):  # type: ignore[arg-type]
                defaults[name] = value  # type: ignore[assignment]
            else:
                _log.warning("%s has %s %r, which no request may have: left out", GENERATION_CONFIG_FILE, name, value)
        return cls(**defaults)  # type: ignore[arg-type]


_RANGES = {
    "temperature": lambda value: 0 <= value <= 100,
    "top_k": lambda value: value >= -1,
    "top_p": lambda value: 0 < value <= 1,
    "min_p": lambda value: 0 <= value <= 1,
    "repetition_penalty": lambda value: 0 < value <= 100,
}
NO_DEFAULTS = SamplingDefaults()


def read_sampling_defaults(folder: Path) -> SamplingDefaults:
    """Returns those of a model's folder; none without the file."""
    path = folder / GENERATION_CONFIG_FILE
    if not path.is_file():
        return NO_DEFAULTS
    values = json.loads(read_companion_file(path, CheckpointError))
    return SamplingDefaults.from_values(values) if isinstance(values, Mapping) else NO_DEFAULTS
