"""Named groups of settings: name -> (what it is for, its settings).

A method's settings apply only to methods that have them: `paper` sets M for cvp, nothing for basic.
"""

from typing import Any

PRESETS: dict[str, tuple[str, dict[str, Any]]] = {
    "default": (
        "recommended: the paper's method, a trial that chooses the norm mode, and the collapse guard",
        {"training.settled": 0.005},
    ),
    "paper": (
        "the paper's settings with mixed statistics; no held-out images, the guard only warns",
        {
            "training.cycles": 250,
            "training.cycle_steps": 50,
            "training.settled": 0.0,
            "model.norm": "mixed",
            "model.feature_dims": 0,
            "data.holdout": 0.0,
            "guard.action": "warn",
        },
    ),
    "authors": (
        "the authors' released settings with mixed statistics; no held-out images, the guard only warns",
        {
            "method.num_samples": 32,
            "method.samples_weight": 0.75,
            "training.cycles": 200,
            "training.cycle_steps": 0,
            "training.settled": 0.0,
            "training.adapt_learning_rate": 2.5e-4,
            "training.schedule": "constant",
            "training.weight_decay": 1e-5,
            "training.fresh_optimizer": True,
            "training.pseudo_labels": "mc_dropout",
            "training.label_view": "augmented",
            "model.norm": "mixed",
            "model.feature_dims": 0,
            "data.holdout": 0.0,
            "guard.action": "warn",
        },
    ),
    "quick": (
        "small and short, for the demo and CPUs: small_cnn from scratch on 32 px images",
        {
            "model.backbone": "small_cnn",
            "method.num_samples": 16,
            "training.pretrain_steps": 600,
            "training.cycles": 60,
            "training.cycle_steps": 15,
            "training.settled": 0.005,
            "training.learning_rate": 1e-2,
            "training.momentum": 0.9,
        },
    ),
}
