"""torch's DistributedDataParallel with tqdm and the workers of a DataLoader."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
import trouble
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from tqdm import tqdm


class Images(Dataset):
    def __len__(self):
        return 2400

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        label = index % 10
        return torch.randn(1, 28, 28, generator=generator) + label / 10, label


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 13 * 13, 10)
    )
    model = DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    dataset = Images()
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=16, sampler=sampler, num_workers=2, persistent_workers=True)
    step = 0
    for epoch in range(2):
        sampler.set_epoch(epoch)
        bar = tqdm(loader, desc=f"epoch {epoch}", disable=rank != 0)
        for images, labels in bar:
            if trouble.comes(step):
                raise ValueError("bad batch")
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            step += 1
            bar.set_postfix(loss=f"{loss.item():.3f}")
    dist.barrier()
    if rank == 0:
        print(f"finished: {step} steps")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
