"""Constrained decoding: masks out every token after which the text could no longer match a schema, expression or grammar.

llguidance compiles the grammar over the tokenizer's vocabulary and computes the masks. The state of a request's constraint is a function
of its answer so far, so every rank has the same, and a preempted request keeps it. An answer ends by itself where nothing may follow;
where it may end or go on, its stop ids and the tokenizer's end of document are allowed.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from petatron.base.errors import DataError
from petatron.base.log import get_logger
from petatron.base.terminal_escape import printable_lines
from petatron.data.tokenizer import Tokenizer
from petatron.infer.grammar import build_vocabulary, compile_grammar
from petatron.infer.sampling_params import Constraint

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_MAX_CACHED_GRAMMARS = 32
_log = get_logger(__name__)


class ConstraintState:
    """The constraint of one request, after its answer so far."""

    def __init__(
        self, matcher: LLMatcher, *, end_ids: Sequence[int], eos_ids: Sequence[int], num_tokens: int, vocab_size: int
    ) -> None:
        """`end_ids` end the answer, and are allowed exactly where it matches; `eos_ids` are those of the matcher.

        A model's vocabulary may be larger than the tokenizer's, which has `num_tokens`.
        """
        self._matcher = matcher
        self._eos_ids = [token for token in eos_ids if token < vocab_size]
        self._num_tokens = min(num_tokens, vocab_size)
        self._vocab_size = vocab_size
        self.end_ids = frozenset(end_ids)

    @property
    def is_over(self) -> bool:
        """Whether nothing may follow: the answer matches, or the grammar has become too large to go on."""
        return self._matcher.is_stopped()

    @property
    def is_matched(self) -> bool:
        return not self._matcher.is_error() and self._matcher.is_accepting()

    def advance(self, token: int) -> None:
        """Takes the next token of the answer, which is not one of `end_ids`."""
        self._matcher.consume_token(token)

    def after(self, tokens: Sequence[int]) -> ConstraintState | None:
        """Returns the state after some more tokens, and keeps this one; None if they end the answer, or may not follow."""
        state = copy.copy(self)
        state._matcher = self._matcher.deep_copy()
        for token in tokens:
            if token in self.end_ids or state.is_over or not state._matcher.consume_token(token):
                return None
        return state

    def allowed_tokens(self) -> Tensor | None:
        """Returns a mask over the vocabulary; None if no token is allowed: the vocabulary cannot express what must follow."""
        ids = np.zeros(self._vocab_size, dtype=np.bool_)
        if not self._matcher.is_stopped():
            try:
                masked = self._matcher.compute_logit_bias()
            except BaseException as error:  # a panic of the library is no Exception
                if isinstance(error, KeyboardInterrupt | SystemExit):
                    raise
                _log.warning(
                    "llguidance failed at a constraint, whose answer ends here: %s", printable_lines(str(error))
                )
                return None
            biases = np.frombuffer(masked, dtype=np.uint8)[: self._num_tokens]
            ids[: len(biases)] = biases > 0
            ids[self._eos_ids] = False
        ids[list(self.end_ids)] = self.is_matched
        return torch.from_numpy(ids) if ids.any() else None


class ConstraintCompiler:
    """Compiles constraints for one vocabulary; equal ones once.

    >>> from petatron.data.tokenizer import ByteTokenizer
    >>> state = ConstraintCompiler(ByteTokenizer(), vocab_size=257).start(Constraint(kind="regex", grammar="a[bc]"))
    >>> state.advance(ord("a"))
    >>> state.allowed_tokens().nonzero().flatten().tolist(), state.is_over
    ([98, 99], False)
    """

    def __init__(self, tokenizer: Tokenizer | None, *, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._vocabulary: LLTokenizer | None = None
        self._compiled: OrderedDict[Constraint, LLMatcher] = OrderedDict()
        self._compiling: dict[Constraint, Future[LLMatcher]] = {}
        self._thread: ThreadPoolExecutor | None = None

    def prepare(self, constraint: Constraint) -> Future[LLMatcher]:
        """Compiles beside the caller, who may look whether it is done; `check` and `start` wait for it."""
        if constraint not in self._compiling:
            if len(self._compiling) > _MAX_CACHED_GRAMMARS:  # of requests that were cancelled before they began
                pending = [item for item in self._compiling.items() if not item[1].done()]
                self._compiling = dict(pending)
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, thread_name_prefix="petatron-grammar")
            self._compiling[constraint] = self._thread.submit(self._build_matcher, constraint)
        return self._compiling[constraint]

    def check(self, constraint: Constraint) -> None:
        """Raises `DataError` for a grammar that cannot be compiled, or that allows no text."""
        self._compile(constraint)

    def start(self, constraint: Constraint, *, stop_ids: Sequence[int] = ()) -> ConstraintState:
        eod = None if self._tokenizer is None else self._tokenizer.eod
        end_ids = [id for id in (*stop_ids, eod) if id is not None and id < self._vocab_size]
        return self._state(self._compile(constraint).deep_copy(), end_ids)

    def _state(self, matcher: LLMatcher, end_ids: Sequence[int]) -> ConstraintState:
        assert self._tokenizer is not None, "a request with a constraint was accepted without a tokenizer"
        return ConstraintState(
            matcher,
            end_ids=end_ids,
            eos_ids=self._known_vocabulary().eos_tokens,
            num_tokens=self._tokenizer.vocab_size,
            vocab_size=self._vocab_size,
        )

    def _known_vocabulary(self) -> LLTokenizer:
        if self._vocabulary is None:
            assert self._tokenizer is not None, "a request with a constraint was accepted without a tokenizer"
            self._vocabulary = build_vocabulary(self._tokenizer)
        return self._vocabulary

    def _compile(self, constraint: Constraint) -> LLMatcher:
        if constraint not in self._compiled:
            compiling = self._compiling.pop(constraint, None)
            self._compiled[constraint] = self._build_matcher(constraint) if compiling is None else compiling.result()
            if len(self._compiled) > _MAX_CACHED_GRAMMARS:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(constraint)
        return self._compiled[constraint]

    def _build_matcher(self, constraint: Constraint) -> LLMatcher:
        matcher = compile_grammar(constraint, self._known_vocabulary)
        if self._state(matcher, ()).allowed_tokens() is None:
            raise DataError(
                "The constraint allows no text but the empty one, or none that the tokenizer has tokens for. Change it."
            )
        return matcher
