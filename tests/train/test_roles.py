"""Weight decay and moments in few bits by what a layer says a parameter is."""

import jax
import jax.numpy as jnp
import pytest

from posttrain.config import AdamW
from posttrain.errors import ConfigError
from posttrain.losses.sft import SFTLoss
from posttrain.models.drafter import DrafterConfig
from posttrain.train.objective import TrainSettings
from posttrain.train.trainer import Trainer
from posttrain.train.transformations import make_optimizer
from posttrain.weights.drafter import attach_drafter
from posttrain.weights.state import ModelWeights
from tests.tiny import tiny_model


def drafted():
    model = tiny_model(num_layers=1, windows=(None,))
    config = model.config
    sizes = DrafterConfig(embed_dim=config.embed_dim, vocab_size=config.vocab_size, tokens=2, window=3, layers=1)
    attach_drafter(model, sizes, seed=0)
    return model


def test_norms_of_a_drafter_do_not_decay() -> None:
    model = drafted()
    weights = ModelWeights(model)
    params = {path: jnp.ones(x.shape) for path, x in weights.read().items() if path in weights.trainable()}
    optimizer = make_optimizer(AdamW(learning_rate=0.1, weight_decay=0.1), 4, seed=0, model=model)
    zeros = jax.tree.map(jnp.zeros_like, params)
    new, _ = jax.jit(lambda g, p: optimizer.update(g, optimizer.init(p), p, lambda x: x, None))(zeros, params)
    for path, x in new.items():
        # 1 - 0.1 * 0.1 for matrices; norms stay.
        assert float(jnp.ravel(x)[0]) == pytest.approx(1.0 if x.ndim == 1 else 0.99), path


def test_a_parameter_without_a_role_is_refused() -> None:
    model = tiny_model(num_layers=1, windows=(None,))
    model.final_norm.scale.set_metadata("role", None)
    with pytest.raises(ValueError, match=r"final_norm.scale has no role"):
        ModelWeights(model).roles()


def test_an_optimizer_made_without_a_model_whose_names_mislead_is_refused() -> None:
    optimizer = make_optimizer(AdamW(learning_rate=0.1, weight_decay=0.1), 4, seed=0)
    with pytest.raises(ConfigError, match="norm_0, a norm"):
        Trainer(drafted(), SFTLoss(), optimizer, TrainSettings(temperature=1.0, max_grad_norm=1.0))
