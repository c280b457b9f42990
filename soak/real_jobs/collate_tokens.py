"""A collate function tokenizes every text of a batch with a loop, in the training process."""

import torch
from small import ended, started
from torch.utils.data import DataLoader, Dataset, DistributedSampler

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "lazy", "dogs"]


class Texts(Dataset):
    def __len__(self):
        return 100_000

    def __getitem__(self, index):
        return " ".join(WORDS[(index + place) % 8] for place in range(200))


def pieces_of(word):
    pieces = list(word)
    while len(pieces) > 1:
        pieces = sum([[pieces[0] + pieces[1]], pieces[2:]], [])
    return pieces


def tokenize_batch(texts):
    rows = []
    for text in texts:
        row = [0.0] * 256
        for word in text.split():
            for piece in pieces_of(word):
                row[sum(map(ord, piece)) % 256] += 1.0
        rows.append(row)
    return torch.tensor(rows)


def main():
    rank, model, optimizer = started()
    texts = Texts()
    loader = DataLoader(texts, 32, sampler=DistributedSampler(texts), collate_fn=tokenize_batch)
    for step, x in enumerate(loader):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 60:
            break
    ended()


main()
