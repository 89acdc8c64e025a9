"""What a module normalizes and how, for any norm layer: ours, torch's, or another library's."""

from normkit.spec.description import describe as describe
from normkit.spec.description import is_tried as is_tried
from normkit.spec.norm_spec import Affine as Affine
from normkit.spec.norm_spec import Axis as Axis
from normkit.spec.norm_spec import Kind as Kind
from normkit.spec.norm_spec import NormSpec as NormSpec
from normkit.spec.norm_spec import Updates as Updates
from normkit.spec.trial import computed as computed
