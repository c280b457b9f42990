"""Training whose data loader is slow for one reason, or is not: ``loaders.py KIND``."""

import os
import sys
import tempfile
import time

import torch
from small import ended, started
from torch.utils.data import DataLoader, Dataset, DistributedSampler, get_worker_info

FILE_BYTES, PIECE = 64 << 20, 1 << 20


class Samples(Dataset):
    def __len__(self):
        return 100_000

    def __getitem__(self, index):
        return torch.full((256,), index % 7 / 7)


def decode(index):
    total = 0
    for number in range(60_000):
        total += number * index % 7
    return total


class Decoded(Samples):
    def __getitem__(self, index):
        decode(index)
        return super().__getitem__(index)


class Fetched(Samples):
    def __getitem__(self, index):
        time.sleep(0.004)
        return super().__getitem__(index)


class OneBad(Samples):
    def __getitem__(self, index):
        if get_worker_info().id == 1:
            time.sleep(0.012)
        return super().__getitem__(index)


class Read(Samples):
    """Pieces of a file, which the page cache keeps unless it is told to forget them."""

    def __init__(self, *, forget):
        self.forget = forget
        self.path = os.path.join(tempfile.gettempdir(), f"pieces-{os.getpid()}.bin")
        with open(self.path, "wb") as file:
            for _ in range(FILE_BYTES // PIECE):
                file.write(os.urandom(PIECE))
            file.flush()
            os.fsync(file.fileno())

    def __getitem__(self, index):
        with open(self.path, "rb", buffering=0) as file:
            for piece in range(8):
                at = (index * 7919 + piece) % (FILE_BYTES // PIECE) * PIECE
                if self.forget:
                    os.posix_fadvise(file.fileno(), at, PIECE, os.POSIX_FADV_DONTNEED)
                os.pread(file.fileno(), PIECE if self.forget else PIECE // 16, at)
        return super().__getitem__(index)


KINDS = {
    "quick": (Samples, 1),
    "decodes": (Decoded, 1),
    "fetches": (Fetched, 1),
    "one_bad_worker": (OneBad, 3),
    "equal_workers": (Samples, 3),
    "cold_disk": (lambda: Read(forget=True), 1),
    "warm_disk": (lambda: Read(forget=False), 1),
}


def main():
    rank, model, optimizer = started()
    make, workers = KINDS[sys.argv[1]]
    samples = make()
    loader = DataLoader(samples, 16, sampler=DistributedSampler(samples), num_workers=workers)
    for step, x in enumerate(loader):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 70:
            break
    if isinstance(samples, Read):
        os.unlink(samples.path)
    ended()


main()
