"""Two optimizers: the critic steps twice for each step of the generator."""

import torch
from torch import nn

torch.set_num_threads(1)
generator, critic = nn.Linear(8, 8), nn.Linear(8, 1)
of_generator = torch.optim.Adam(generator.parameters())
of_critic = torch.optim.RMSprop(critic.parameters())
for _ in range(12):
    for _ in range(2):
        of_critic.zero_grad()
        critic(generator(torch.randn(4, 8)).detach()).mean().backward()
        of_critic.step()
    of_generator.zero_grad()
    critic(generator(torch.randn(4, 8))).mean().backward()
    of_generator.step()
print("done")
