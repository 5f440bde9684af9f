"""Models of transformers under ddp: those of one process on the whole batch, and of torch's class."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
from testbed.nursery import Nursery
from testbed.require import require

MODELS = ["gpt2", "t5", "mixtral", "vit", "whisper", "clip"]

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("world", [2, 3])
def test_models_train_as_in_one_process_and_in_torch_s_class(nursery: Nursery, world: int) -> None:
    """Tied weights (GPT-2, T5, Whisper), experts and parameters without use (Mixtral, CLIP), labels as padding.

    Of two ranks' gradients there is one sum, so torch's class gets the same bits. Those of three are added in an order
    that depends on a gradient's place in its bucket, where ours carries the ranks' statuses too.
    """
    require(find_spec("transformers"), "transformers", "scripts/test --full")
    for found in nursery.run(world, "testbed.transformers_models:models_train_as_alone", deadline_s=250, names=MODELS):
        assert list(found) == MODELS
        for name, differences in found.items():
            assert differences["moved"] > 1e-3, name
            assert differences["alone"] <= 1e-11, (name, differences)
            assert differences.get("padded", 0) <= 1e-11, (name, differences)
            assert differences["torch"] <= (0 if world == 2 else 1e-11), (name, differences)
