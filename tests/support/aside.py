"""Import this before timm, torchvision, Opacus or torchao: they are installed aside, where only who asks finds them.

torchvision's Python part registers shapes for two operators of its compiled part when it is imported, and fails without
them; networks do not call them, so that a declaration is enough.
"""

import sys
from pathlib import Path

import torch
from torch import library

FOLDER = Path(sys.prefix) / "aside"

if str(FOLDER) not in sys.path:
    sys.path.append(str(FOLDER))

if not hasattr(torch.ops.torchvision, "nms"):
    _declared = library.Library("torchvision", "FRAGMENT")
    for _name in ("nms", "qnms"):
        _declared.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
