"""Wrap a model of your own in GPipe, and train it as before."""

import torch
from torch import nn

from gpipe import GPipe
from gpipe.data import digits

data = digits()
inputs, targets = data.train.tensors
torch.manual_seed(0)

# Any nn.Sequential: here 3 layers on the first stage and 2 on the second.
layers = nn.Sequential(
    nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)
)
model = GPipe(layers, balance=[3, 2], chunks=4)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
loss_fn = nn.CrossEntropyLoss()

for epoch in range(5):
    for rows in torch.randperm(len(inputs)).split(64):
        optimizer.zero_grad()
        # The schedule runs forward and backward; the gradients are those of the whole mini-batch.
        result = model.step(inputs[rows], targets[rows], loss_fn)
        # Or as an ordinary module: loss_fn(model(inputs[rows]), targets[rows]).backward()
        optimizer.step()
    print(f"epoch {epoch + 1}: loss {result.loss:.4f}")

model.eval()
test_inputs, test_targets = data.test.tensors
with torch.no_grad():
    accuracy = (model(test_inputs).argmax(dim=1) == test_targets).float().mean()
print(f"test accuracy {accuracy:.1%}")
