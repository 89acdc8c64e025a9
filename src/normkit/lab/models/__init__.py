"""The lab's models. Each takes the norm as a parameter: a function of the channels, or None to be without."""

from collections.abc import Callable
from typing import Any

from normkit.lab.models.dcgan import dcgan as dcgan
from normkit.lab.models.inception import Inception as Inception
from normkit.lab.models.inception import bn_inception as bn_inception
from normkit.lab.models.inception import small_inception as small_inception
from normkit.lab.models.initial import InitName as InitName
from normkit.lab.models.initial import initialize_ as initialize_
from normkit.lab.models.mlp import SigmoidMLP as SigmoidMLP
from normkit.lab.models.mlp import sigmoid_mlp as sigmoid_mlp
from normkit.lab.models.resnet import ResNet as ResNet
from normkit.lab.models.resnet import resnet as resnet
from normkit.lab.models.resnet import resnet18 as resnet18
from normkit.lab.models.units import Finish as Finish
from normkit.lab.models.units import Norm as Norm
from normkit.lab.models.units import unit as unit
from normkit.lab.models.vgg import vgg as vgg

# All return one model, but for "dcgan", which returns a generator and a discriminator.
MODELS: dict[str, Callable[..., Any]] = {
    "bn-inception": bn_inception,
    "dcgan": dcgan,
    "resnet": resnet,
    "resnet18": resnet18,
    "sigmoid-mlp": sigmoid_mlp,
    "small-inception": small_inception,
    "vgg": vgg,
}
