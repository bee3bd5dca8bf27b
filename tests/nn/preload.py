"""What torch imports when the first optimizer is made: seconds that forks then need not spend."""

import torch

torch.optim.SGD([torch.zeros(1)], lr=0.1)
