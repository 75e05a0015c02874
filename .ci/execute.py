"Run notebooks in place so that their committed outputs are current; skips what nbdev_test skips."
import os, sys, warnings
from pathlib import Path
os.environ.setdefault('TQDM_DISABLE', '1'); os.environ.setdefault('PYTHONWARNINGS', 'ignore:IProgress not found')
from execnb.nbio import read_nb, write_nb
from execnb.shell import CaptureShell
from fastcore.xtras import working_directory
from nbdev.clean import clean_nb
from nbdev.config import get_config
from nbdev.process import extract_directives

warnings.filterwarnings('ignore', 'IProgress not found')
cfg = get_config()
flags = set(cfg.tst_flags.split())

def skipped(cell):
    "Is this a cell that nbdev_test leaves out?"
    d = extract_directives(cell, remove=False) if cell.cell_type == 'code' else {}
    return bool(flags & d.keys()) or d.get('eval:') == ['false']

for p in map(Path, sys.argv[1:]):
    nb = read_nb(p)
    sh = CaptureShell(p.absolute(), mpl_format='png')
    with working_directory(p.parent): sh.run_all(nb, exc_stop=True, preproc=skipped)
    for c in nb.cells: # a terminal's stray lines are no result
        if c.cell_type == 'code': c.outputs = [o for o in c.outputs if o.get('name') != 'stderr']
    clean_nb(nb, allowed_cell_metadata_keys=cfg.allowed_cell_metadata_keys.split())
    write_nb(nb, p)
    print(p)
