"""What tests of several parts of ddp start from."""

from collections.abc import Iterator

import pytest


@pytest.fixture
def group_of_one() -> Iterator[None]:
    import torch.distributed as dist  # heavy: not for the quick tests, which read this file too

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
