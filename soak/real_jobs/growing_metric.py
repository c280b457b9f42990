"""A metric over all predictions so far is computed in each step: it takes ever longer."""

from small import batch, ended, started


def ranked_share(scores):
    ordered = sorted(scores)
    middle = ordered[len(ordered) // 2]
    return sum(score > middle for score in ordered) / len(ordered)


def main():
    rank, model, optimizer = started()
    scores, shares = [], []
    for step in range(240):
        output = model(batch())
        loss = output.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scores.extend(output.detach()[:, :32].flatten().tolist())
        shares.append(ranked_share(scores))
    ended()


main()
