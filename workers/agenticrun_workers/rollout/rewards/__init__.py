"""Judges: reward functions, reward models and language models that score finished episodes."""

from agenticrun_workers.rollout.rewards.judge import (
    Judge,
    JudgeConfigError,
    JudgedEpisode,
    JudgedTurn,
    JudgeFailed,
    JudgeImportError,
    Judgement,
    JudgeNotFound,
    judged_episode,
    make_judge,
    register_judge,
)
from agenticrun_workers.rollout.rewards.llm import LLMJudge
from agenticrun_workers.rollout.rewards.panel import JudgePanel
from agenticrun_workers.rollout.rewards.reward_model import RewardModelJudge

__all__ = [
    "Judge",
    "JudgeConfigError",
    "JudgeFailed",
    "JudgeImportError",
    "JudgeNotFound",
    "JudgePanel",
    "JudgedEpisode",
    "JudgedTurn",
    "Judgement",
    "LLMJudge",
    "RewardModelJudge",
    "judged_episode",
    "make_judge",
    "register_judge",
]
