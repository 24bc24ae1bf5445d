"""`--environment`: FILE.py:CLASS, tools:FILE.py, or the address of a server."""

from __future__ import annotations

from pathlib import Path

from petatron.base.errors import ConfigError, Problem
from petatron.config.schema.rollout import RolloutConfig
from petatron.data.prompt.chat_template import tokenizer_chat_template
from petatron.data.tokenizer import Tokenizer
from petatron.infer.tool_calls import TOOL_CALL_FORMATS, template_format
from petatron.posttrain.environments.environment_backend import EnvironmentBackend
from petatron.posttrain.environments.forked_environments import ForkedEnvironments
from petatron.posttrain.environments.http_environments import HttpEnvironments
from petatron.posttrain.http_client import HTTP_SCHEMES

_FLAG = "--environment"
_TOOLS = "tools:"


def environment_backend(settings: RolloutConfig, tokenizer: Tokenizer) -> EnvironmentBackend | None:
    """Returns what runs the environments of a run; None without one. Raises `ConfigError` if they cannot be."""
    text = settings.environment
    if text is None:
        return None
    timeout_s = settings.reward_timeout_s
    if text.startswith(HTTP_SCHEMES):
        return HttpEnvironments(text, timeout_s=timeout_s)
    if text.startswith(_TOOLS):
        file = _python_file(text, text.removeprefix(_TOOLS))
        template = tokenizer_chat_template(tokenizer)
        form = None if template is None else template_format(template.tool_source)
        if form is None:
            rule = f"needs a chat template that shows calls in a known format ({', '.join(TOOL_CALL_FORMATS)})"
            fix = "Give another tokenizer or --chat-template, or an environment of a class that reads calls itself."
            raise ConfigError([Problem(_FLAG, text, rule, fix)])
        return ForkedEnvironments(file, "", form=form, timeout_s=timeout_s)
    name, _, kind = text.rpartition(":")
    if not name.endswith(".py") or not kind.isidentifier():
        fix = "Write FILE.py:CLASS, tools:FILE.py, or the http address of a server."
        raise ConfigError([Problem(_FLAG, text, "names no environment", fix)])
    return ForkedEnvironments(_python_file(text, name), kind, timeout_s=timeout_s)


def _python_file(text: str, name: str) -> Path:
    if not name.endswith(".py"):
        raise ConfigError([Problem(_FLAG, text, "names no Python file", f"Write {_TOOLS}FILE.py.")])
    path = Path(name)
    if not path.is_file():
        raise ConfigError([Problem(_FLAG, text, f"names the file {name}, which does not exist", "Correct the path.")])
    return path.resolve()
