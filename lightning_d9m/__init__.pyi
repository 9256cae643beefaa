from . import probe as probe
from .engine.control.session import Session as Session
from .engine.control.session import deterministic as deterministic
from .engine.control.session import enable as enable
from .engine.control.settings import Settings as Settings
from .engine.hashing.digest import digest as digest
from .engine.hashing.digest import digest_many as digest_many
from .engine.hashing.digest import digest_value as digest_value
from .engine.ledger.differences import Divergence as Divergence
from .engine.ledger.folder import Ledger as Ledger
from .engine.ledger.folder import read_ledger as read_ledger
from .errors import CheckpointError as CheckpointError
from .errors import CommandError as CommandError
from .errors import D9mError as D9mError
from .errors import DigestError as DigestError
from .errors import DriftError as DriftError
from .errors import HookMissingError as HookMissingError
from .errors import InexactResumeError as InexactResumeError
from .errors import LedgerError as LedgerError
from .errors import NotBitExactError as NotBitExactError
from .errors import NotPortableError as NotPortableError
from .errors import RankLostError as RankLostError
from .errors import RanksDisagreeError as RanksDisagreeError
from .errors import ReferenceRefusedError as ReferenceRefusedError
from .errors import SettingError as SettingError
from .errors import StackDifferenceError as StackDifferenceError
from .errors import TooLateError as TooLateError
from .integrations.lightning.callback import DeterminismCallback as DeterminismCallback
from .integrations.loop.recorder import Recorder as Recorder
from .integrations.loop.recorder import record_final as record_final
from .integrations.loop.transformers_callback import TransformersCallback as TransformersCallback
from .integrations.strategies.horovod.strategy import (
    HorovodDeterministicStrategy as HorovodDeterministicStrategy,
)
from .integrations.strategies.steps.strategy import (
    DDPDeterministicStrategy as DDPDeterministicStrategy,
)
from .ops.portability.mode import portable as portable
from .testing import assert_bit_exact as assert_bit_exact
from .tools.comparison.ledgers import Comparison as Comparison
from .tools.comparison.ledgers import compare as compare
from .tools.comparison.numeric_difference import SpreadMeter as SpreadMeter
from .version import __version__ as __version__
