"""A loop at the top level of a script logs values as JSON in every step."""

import json
import logging
import os

from small import batch, ended, started

rank, model, optimizer = started()
log = logging.getLogger("train")
log.addHandler(logging.FileHandler(f"{os.environ['SCRATCH']}/log-{rank}.txt"))
log.setLevel(logging.INFO)
for step in range(40):
    loss = model(batch()).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    values = {name: p.flatten()[:400].tolist() for name, p in model.named_parameters()}
    for _ in range(15):
        log.info(json.dumps(values))
ended()
