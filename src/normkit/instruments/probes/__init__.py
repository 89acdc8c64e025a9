"""What can be measured: one probe each."""

from normkit.instruments.probe import ForwardProbe, Probe
from normkit.instruments.probes.activation_moments import ActivationMoments
from normkit.instruments.probes.activation_quantiles import ActivationQuantiles
from normkit.instruments.probes.batch_coupling import BatchCoupling
from normkit.instruments.probes.boundary_distances import BoundaryDistances
from normkit.instruments.probes.covariate_shift import CovariateShift
from normkit.instruments.probes.dead_units import DeadUnits
from normkit.instruments.probes.effective_rate import EffectiveRate
from normkit.instruments.probes.gradient_norms import GradientNorms
from normkit.instruments.probes.landscape import Landscape
from normkit.instruments.probes.statistics_noise import StatisticsNoise

__all__ = [
    "ActivationMoments",
    "ActivationQuantiles",
    "BatchCoupling",
    "BoundaryDistances",
    "CovariateShift",
    "DeadUnits",
    "EffectiveRate",
    "ForwardProbe",
    "GradientNorms",
    "Landscape",
    "Probe",
    "StatisticsNoise",
]
