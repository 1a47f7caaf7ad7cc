"""Agents: one rollout function a scenario, all with the signature of `single_rollout`."""

from __future__ import annotations

from mosaic.agents.compaction import compaction_rollout
from mosaic.agents.forking import forking_rollout
from mosaic.agents.react import single_rollout
from mosaic.agents.rollout import Dropped

SCENARIOS = {"compaction": compaction_rollout, "forking": forking_rollout, "single": single_rollout}

__all__ = ["SCENARIOS", "Dropped", "compaction_rollout", "forking_rollout", "single_rollout"]
