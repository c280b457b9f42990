"""Train with a limit on how large a file may grow, as a full disk has."""

import resource
import signal

from model import Training

training = Training()
training.step()
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
for _ in range(20):
    training.step()
training.finish()
