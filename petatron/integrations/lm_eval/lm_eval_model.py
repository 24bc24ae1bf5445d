"""`PetatronLM`: the model `petatron` of lm-evaluation-harness, registered on import.

Log-likelihoods are those of `petatron eval`: the same tokenization of pairs, the same BOS token, the same scores. Documents are cut
into lm_eval's own windows. Answers come from the generation engine, which has memory only while it answers.

    import lm_eval, petatron.integrations.lm_eval
    lm_eval.simple_evaluate(model="petatron", model_args={"pretrained": "runs/demo"}, tasks=["arc_easy"])
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import lm_eval.models  # noqa: F401 - lm_eval reads the table of its own models only while no model is registered
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from petatron.base.errors import ConfigError, DataError, Problem
from petatron.base.format_text import count_with_noun
from petatron.base.log import get_logger
from petatron.data.prompt.chat_template import tokenizer_chat_template
from petatron.data.prompt.prompt_encoder import bos_ids, document_start, with_bos
from petatron.evaluate.eval_task import truncate_left
from petatron.evaluate.multiple_choice import encode_pairs
from petatron.evaluate.score_sequences import max_scored_tokens, score_sequences
from petatron.infer.engine import Engine
from petatron.infer.sampling_params import SamplingParams
from petatron.integrations.lm_eval.model_args import read_model_args, sampling_params
from petatron.mesh.launch.environment import read_environment
from petatron.serve.open_engine import load_model, model_settings

_log = get_logger(__name__)


@register_model("petatron")
class PetatronLM(TemplateLM):
    """A checkpoint on one device; its arguments are those of `ModelArgs`."""

    def __init__(self, **model_args: Any) -> None:
        super().__init__()
        self._args = args = read_model_args(model_args, world_size=read_environment().world_size)
        settings = model_settings(args.pretrained, args.flags, weights=args.weights)
        self._tokens = settings.required_tokenizer()
        self._template = tokenizer_chat_template(self._tokens)
        self._stop_ids = settings.stop_ids
        self._bos = bos_ids(self._tokens, add=args.add_bos_token)
        start = document_start(self._tokens, self._bos) if args.prefix_token_id is None else args.prefix_token_id
        if start is None or not 0 <= start < settings.vocab_size:
            rule = f"is not one of the model's {settings.vocab_size} ids, and documents need one to start from"
            raise ConfigError([Problem("prefix_token_id", str(start), rule, "Give prefix_token_id=ID.")])
        self._start = start
        self._model = load_model(settings, dtype=args.dtype)
        longest = max_scored_tokens(self._model) - 1
        self.max_length = min(args.max_length or longest, longest)
        """Inputs at once."""

    @property
    def eot_token_id(self) -> int:
        return self._start if self._tokens.eod is None else self._tokens.eod

    @property
    def prefix_token_id(self) -> int:
        return self._start

    @property
    def tokenizer_name(self) -> str:
        return self._tokens.name.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        ids = self._tokens.encode(string)
        return ids if add_special_tokens is False else with_bos(ids, self._bos)

    def chat_template(self, chat_template: bool | str = False) -> str:
        """Returns the source of the template, which lm_eval records."""
        return "" if self._template is None or not chat_template else self._template.source

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Returns a dialogue as text; without a generation prompt it ends inside the last message, which the model continues."""
        if self._template is None:
            raise DataError(
                f"{self._args.pretrained} has no chat template in its tokenizer. Leave out --apply_chat_template."
            )
        text = self._template.render(chat_history, add_generation_prompt=add_generation_prompt)
        last = "" if add_generation_prompt else chat_history[-1]["content"].strip()
        return text[: text.rindex(last) + len(last)] if last and last in text else text

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        pairs = [request.args for request in requests]
        encoded = encode_pairs(self._tokens, pairs, source="The task", bos=self._bos, start=self._start)
        return self._score(encoded, disable_tqdm=disable_tqdm)

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        windows: list[tuple[list[int], int]] = []
        owners: list[int] = []
        for number, ids in enumerate(self._tokens.encode_batch([request.args[0] for request in requests])):
            asked = get_rolling_token_windows(ids, self._start, self.max_length, 1)
            disjoint = [make_disjoint_window(window) for window in asked]
            windows += [([*context, *predicted], len(predicted)) for context, predicted in disjoint]
            owners += [number] * len(disjoint)
        totals = [0.0] * len(requests)
        for owner, (logprob, _) in zip(owners, self._score(windows, disable_tqdm=disable_tqdm), strict=True):
            totals[owner] += logprob
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        prompts = self._prompts([request.args for request in requests])
        engine = Engine(self._model, self._tokens, self._args.engine_options(self.max_length))
        numbers = {engine.submit(ids, params): number for number, (ids, params) in enumerate(prompts)}
        texts = [""] * len(prompts)
        with tqdm(total=len(prompts), desc="Answers", disable=disable_tqdm) as bar:
            while engine.has_work:
                for event in engine.step():
                    if event.finish_reason is not None:
                        number = numbers[event.request]
                        texts[number] = engine.take(event.request).text
                        self.cache_hook.add_partial("generate_until", requests[number].args, texts[number])
                        bar.update()
        engine.close()
        return texts

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        items = [([*(context or [self._start]), *ids], len(ids)) for _, context, ids in requests]
        return self._score(items, disable_tqdm=disable_tqdm)

    def _score(self, items: Sequence[tuple[list[int], int]], *, disable_tqdm: bool) -> list[tuple[float, bool]]:
        """Returns the log-probability of the last ids of each sequence, and whether they are all the most likely ones."""
        sequences = [truncate_left(ids, self.max_length + 1)[0] for ids, _ in items]
        self._note_cut(sum(len(ids) > len(kept) for (ids, _), kept in zip(items, sequences)))
        with tqdm(desc="Scored tokens", disable=disable_tqdm) as bar:

            def show(done: int, total: int) -> None:
                bar.total = total
                bar.update(done - bar.n)

            batch_tokens = self._args.batch_tokens(self.max_length)
            scores = score_sequences(self._model, sequences, batch_tokens=batch_tokens, on_progress=show)
        results: list[tuple[float, bool]] = []
        for score, (_, count) in zip(scores, items, strict=True):
            first = max(len(score.logprobs) - count, 0)
            results.append((float(score.logprobs[first:].sum()), bool(score.greedy[first:].all())))
        return results

    def _prompts(self, given: Sequence[tuple[str, Mapping[str, Any]]]) -> list[tuple[list[int], SamplingParams]]:
        """Returns the ids of each prompt, cut from the left so that its answer has room, and how it is continued."""
        prompts: list[tuple[list[int], SamplingParams]] = []
        repeats: Counter[str] = Counter()
        num_cut = 0
        for text, settings in given:
            default, stop_ids, sample = self._args.max_gen_toks, self._stop_ids, repeats[text]
            params = sampling_params(settings, default_max_tokens=default, stop_ids=stop_ids, sample=sample)
            repeats[text] += 1
            room = self.max_length + 1 - params.max_new_tokens
            if room < 1:
                raise DataError(
                    f"A task asks for {params.max_new_tokens} new tokens, and prompt and answer together have {self.max_length + 1}. "
                    "Ask for fewer: --gen_kwargs max_gen_toks=N."
                )
            ids, cut = truncate_left(self.tok_encode(text) or [self._start], room)
            num_cut += cut
            prompts.append((ids, params))
        self._note_cut(num_cut)
        return prompts

    def _note_cut(self, number: int) -> None:
        if number:
            what = count_with_noun(number, "sequence")
            _log.warning(f"{what} cut from the left to fit into {self.max_length} inputs")
