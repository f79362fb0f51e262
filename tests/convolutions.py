"""Two models of few convolutions, on which tests show what the compiler makes of weight gradients."""

from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm


class Residual(nn.Module):
    """Three convolutions with a skip around one: two give both gradients, the first that of its weight alone."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv2d(a, 4, 3, padding=1, bias=False) for a in (3, 4, 4))
        self.linear = nn.Linear(4 * 64, 10)

    def forward(self, images: Tensor) -> Tensor:
        first, second, third = self.convolutions
        outputs = first(images).relu()
        outputs = third(second(outputs).relu() + outputs).relu()
        logits: Tensor = self.linear(outputs.flatten(1))
        return logits


class Repeated(nn.Module):
    """A convolution whose weight is read so many times; and one whose weight may be computed of others."""

    def __init__(self, times: int, is_computed: bool = False) -> None:
        super().__init__()
        self.times = times
        self.first = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.again = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        if is_computed:
            weight_norm(self.first)

    def forward(self, images: Tensor) -> Tensor:
        outputs: Tensor = self.first(images).relu()
        for _ in range(self.times):
            outputs = self.again(outputs).relu()
        return outputs.flatten(1).sum(1, keepdim=True).expand(-1, 10)
