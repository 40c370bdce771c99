"""Name groups of settings: preset -> (what it is for, its settings).

A method's settings apply only to methods that have them: `paper` sets M for cvp, nothing for basic.
"""

from typing import Any

# On Office-31 (ResNet-50 v1, seed 0), a frozen backbone was better than any way of training it.
RECOMMENDED: dict[str, Any] = {
    "model.train": "auto",
    "training.pseudo_labels": "cluster",
    "training.settled": 0.005,
    "model.adapter": False,  # with a frozen backbone, so that neighbours are computed once
}
# As published: labels from the classifier alone, and one learning rate.
PUBLISHED: dict[str, Any] = {
    "training.settled": 0.0,
    "training.head_rate": 1.0,
    "model.norm": "mixed",
    "model.feature_dims": 0,
    "data.holdout": 0.0,
    "training.class_power": 0.0,
    "guard.action": "warn",
}

PRESETS: dict[str, tuple[str, dict[str, Any]]] = {
    "default": (
        "recommended: the paper's method, labels from clusters; safe if the target lacks classes",
        RECOMMENDED,
    ),
    "paper": (
        "the paper's settings with mixed statistics; no held-out images, the guard only warns",
        {**PUBLISHED, "training.cycles": 250, "training.cycle_steps": 50},
    ),
    "authors": (
        "the authors' released settings with mixed statistics; no held-out images, the guard "
        "only warns",
        {
            **PUBLISHED,
            "method.num_samples": 32,
            "method.samples_weight": 0.75,
            "training.cycles": 200,
            "training.cycle_steps": 0,
            "training.adapt_learning_rate": 2.5e-4,
            "training.schedule": "constant",
            "training.weight_decay": 1e-5,
            "training.fresh_optimizer": True,
            "training.pseudo_labels": "mc_dropout",
            "training.label_view": "augmented",
        },
    ),
    "quick": (
        "small and short, for the demo and CPUs: small_cnn from scratch on 32 px images",
        {
            **RECOMMENDED,
            "model.backbone": "small_cnn",
            "model.train": "all",
            "method.num_samples": 16,
            "training.pretrain_steps": 600,
            "training.cycles": 60,
            "training.cycle_steps": 15,
            "training.learning_rate": 1e-2,
            "training.momentum": 0.9,
        },
    ),
}
