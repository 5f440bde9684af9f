"""What tests of several parts of ddp start from."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist


@pytest.fixture
def group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
