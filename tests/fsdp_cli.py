"""polydecode's command line with accelerate told to shard on the CPU, which it does on GPUs only; run by test_fsdp.py."""

from accelerate import state
from accelerate.utils import DistributedType

from polydecode.__main__ import program
from polydecode.ops import losses
from polydecode.train import arguments

_original = state.AcceleratorState.__init__


def _shard_on_cpu(self, *args, fsdp_plugin=None, **kwargs):
    _original(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
    if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
        self.distributed_type = DistributedType.FSDP
        if self._mixed_precision != "no":
            fsdp_plugin.set_mixed_precision(self._mixed_precision)
        self.fsdp_plugin = fsdp_plugin


state.AcceleratorState.__init__ = _shard_on_cpu
arguments.check_can_shard = lambda: None
losses.CHUNK_TOKENS = 5  # so that processes have different numbers of chunks

if __name__ == "__main__":
    program()
