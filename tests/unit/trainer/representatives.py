"""Recipes of which one has each kind of state of an update: the fast tests of what must be equal bit for bit run them,
and the suite recipes runs all."""

from __future__ import annotations

from rollmesh.mesh.config import MeshConfig
from rollmesh.shared.config.plugin import overrides
from rollmesh.trainer.losses import LossTerm
from rollmesh.trainer.plugins import Plugins


def kinds_of(config: MeshConfig) -> set[str]:
    """Return the parts of the update of a run that have memory or modules, its update rule, its optimizer, and when its
    features are computed."""
    plugins = Plugins(config.learner, reward_weights=config.reward.weights)
    modules = [name for name, term in plugins.loss.terms.items() if overrides(term, LossTerm.make_module)]
    features = [f"{r.under} {r.grad} {r.reads_others}" for r in plugins.requests.values()]
    reference = [f"reference {config.learner.reference.kind}"] if plugins.under("reference") else []
    names = (config.learner.update_rule.name, config.learner.optimizer.kind)
    replay = ["router_replay"] if config.learner.router_replay else []
    return {*plugins.state(), *modules, *features, *reference, *names, *replay}


REPRESENTATIVES = (
    "ace", "archer", "clip_cov", "doctor_agent", "dr_po", "grpo_adaptive_kl", "grpo_entropy_target",
    "grpo_router_replay", "mssr", "otr", "pf_ppo", "recap", "red", "rep_exp", "riql", "risk_po", "rover", "seeupo", "siren",
    "spa", "text_feedback", "v0", "vcpo", "verl_rank", "wsrl",
)  # fmt: skip
"""`tests/integration/test_exact_resume.py` compares them with the recipes."""
