"""The one benchmark harness: ours, torch eager, torch.compile and the memory limit, side by side on this machine."""

from normkit.bench.case import EAGER as EAGER
from normkit.bench.case import FULL as FULL
from normkit.bench.case import OURS as OURS
from normkit.bench.case import QUICK as QUICK
from normkit.bench.case import Effort as Effort
from normkit.bench.case import Result as Result
from normkit.bench.cases import FAMILIES as FAMILIES
from normkit.bench.cases import choose as choose
from normkit.bench.figure import SummaryRow as SummaryRow
from normkit.bench.machine_load import is_crowded as is_crowded
from normkit.bench.network_case import check_installed as check_installed
from normkit.bench.progress import Progress as Progress
from normkit.bench.runner import Allocator as Allocator
from normkit.bench.runner import BenchmarkError as BenchmarkError
from normkit.bench.runner import InstructionSet as InstructionSet
from normkit.bench.runner import Plan as Plan
from normkit.bench.runner import record as record
from normkit.bench.runner import run as run
from normkit.bench.runner import using_instruction_set as using_instruction_set
from normkit.bench.spread import Spread as Spread
from normkit.bench.summary import summarize as summarize
from normkit.bench.traffic_table import TrafficRow as TrafficRow
from normkit.bench.traffic_table import count_traffic as count_traffic
