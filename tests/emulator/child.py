"""`python -m emulator.child GIVEN RESULT`: calls a function; see `emulator.call`."""

import importlib.util
import pickle
import sys
from pathlib import Path

import torch

torch.set_num_threads(1)
file, name, args = pickle.loads(Path(sys.argv[1]).read_bytes())
spec = importlib.util.spec_from_file_location(Path(file).stem, file)
assert spec is not None
assert spec.loader is not None
module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
found = getattr(module, name)(*args)
Path(sys.argv[2]).write_bytes(pickle.dumps(found))
