"""Every sample of a batch is changed by itself, by operators, before the model gets it."""

import torch
from small import batch, ended, started


def changed(image):
    if torch.rand(()) < 0.5:
        image = image.flip(1)
    shift, scale = torch.rand(()) - 0.5, torch.rand(()) + 0.5
    image = torch.roll(image, int(4 * shift), 0)
    return (image * scale + shift + 0.1 * torch.randn_like(image)).clamp(-2, 2)


def augment(images):
    return torch.stack([changed(image) for image in images])


def main():
    rank, model, optimizer = started()
    for step in range(60):
        images = augment(batch(size=128).reshape(128, 16, 16))
        loss = model(images.flatten(1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    ended()


main()
