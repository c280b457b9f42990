"""Python's collector runs by itself, beside many objects that live on."""

from small import batch, ended, started


class Token:
    def __init__(self, number):
        self.number, self.same = number, self


def tokenized(count):
    return [Token(number) for number in range(count)]


def main():
    rank, model, optimizer = started()
    kept = [{"id": number, "words": [str(number)] * 2} for number in range(300_000)]
    history = []
    for step in range(150):
        history.append(tokenized(5_000))
        loss = model(batch()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    ended()
    return kept


main()
