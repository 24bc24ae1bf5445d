"""`EnvironmentTurns`: asks environments what answers lead to, on rank 0, and tells all ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from petatron.base.errors import DataError
from petatron.data.conversations.following_messages import FollowingMessages
from petatron.data.prompt.prompt_encoder import PromptEncoder, check_unicode
from petatron.data.tokenizer import Tokenizer
from petatron.mesh.json_collectives import broadcast_json
from petatron.mesh.mesh import ParallelMesh
from petatron.posttrain.environments.environment import EnvironmentProperties, Observation
from petatron.posttrain.environments.environment_pool import EnvironmentPool
from petatron.posttrain.episode import Episode, Turn
from petatron.posttrain.rewards.function_pool import RewardFailure


class EnvironmentTurns:
    """Every rank calls its methods; `pool` is used by rank 0 alone. max_ids: of an episode, with its prompt."""

    def __init__(
        self,
        mesh: ParallelMesh,
        pool: EnvironmentPool,
        tokenizer: Tokenizer,
        properties: EnvironmentProperties,
        *,
        seed: int,
        max_ids: int,
    ) -> None:
        self._mesh, self._pool, self._tokenizer, self.stop = mesh, pool, tokenizer, properties.stop
        self._tools, self._seed, self._max_ids = properties.tools, seed, max_ids
        self._encoder = PromptEncoder(tokenizer)
        self._following = FollowingMessages(tokenizer, tools=properties.tools)
        self._numbers: dict[int, int] = {}

    def start(self, episodes: Sequence[Episode], purpose: str) -> None:
        """Begins the environment of each episode, and appends what follows its prompt."""
        turns = []
        if self._mesh.world.rank == 0:
            self._numbers = {id(episode): number for number, episode in enumerate(episodes)}
            seeds = [_seed(self._seed, purpose, episode) for episode in episodes]
            observations = self._pool.start(
                [(episode.prompt.record, seed) for episode, seed in zip(episodes, seeds, strict=True)]
            )
            turns = [self._beginning(*pair).to_json() for pair in zip(episodes, observations)]
        for episode, values in zip(episodes, broadcast_json(turns, self._mesh.control), strict=True):
            turn = Turn(*values)
            episode.failure, episode.ended = turn.failure, turn.failure is not None
            episode.prompt_ids = tuple(turn.ids) or episode.prompt_ids
        self._end([episode for episode in episodes if episode.ended])

    def step(self, episodes: Sequence[Episode], *, last: bool) -> None:
        """Gives each episode's answer to its environment, and appends what follows; `last`: no answer may follow."""
        turns = []
        if self._mesh.world.rank == 0:
            results = self._pool.step([(self._numbers[id(episode)], episode.text) for episode in episodes])
            for episode, result in zip(episodes, results, strict=True):
                if isinstance(result, RewardFailure):
                    turns.append(Turn(failure=f"--environment: {result}").to_json())
                    continue
                observation = None if result.done or last else result.observation
                turn = self._encoded(episode, observation)
                turns.append(Turn(turn.ids, result.reward, result.done, turn.failure).to_json())
        for episode, values in zip(episodes, broadcast_json(turns, self._mesh.control), strict=True):
            episode.apply(Turn(*values), max_ids=self._max_ids)
            episode.ended = episode.ended or last
        self._end([episode for episode in episodes if episode.ended])

    def close(self) -> None:
        self._pool.close()

    def _end(self, episodes: Sequence[Episode]) -> None:
        if self._mesh.world.rank == 0:
            self._pool.end([self._numbers[id(episode)] for episode in episodes])

    def _beginning(self, episode: Episode, observation: Observation | RewardFailure | None) -> Turn:
        """Returns all ids of a prompt with what follows it."""
        if isinstance(observation, RewardFailure):
            return Turn(failure=f"--environment: {observation}")
        messages = episode.prompt.messages
        try:
            if observation is None:
                return Turn()
            if isinstance(observation, str):
                ids = [*episode.prompt_ids, *self._tokenizer.encode(check_unicode(observation))]
            elif messages is None:
                return Turn(failure="--environment: messages follow a prompt that is a text. Use --rollout-chat")
            else:
                ids = self._encoder.encode_messages([*messages, *observation], tools=self._tools or None)
        except DataError as error:
            return Turn(failure=f"--environment: {error}")
        if len(ids) >= self._max_ids:
            return Turn(failure="--environment: the prompt with what follows it leaves no room for an answer")
        return Turn(ids)

    def _encoded(self, episode: Episode, observation: Observation | None) -> Turn:
        try:
            if observation is None:
                return Turn()
            if isinstance(observation, str):
                return Turn(self._tokenizer.encode(check_unicode(observation)))
            if episode.prompt.messages is None:
                return Turn(failure="--environment: messages follow a prompt that is a text. Use --rollout-chat")
            return Turn(self._following.encode(episode.ids, observation))
        except DataError as error:
            return Turn(failure=f"--environment: {error}")


def _seed(seed: int, purpose: str, episode: Episode) -> int:
    digest = hashlib.sha256(f"{seed}/{purpose}/environment/{episode.group}/{episode.sample}".encode()).digest()
    return int.from_bytes(digest[:4], "big")
