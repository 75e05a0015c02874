"What nbdev_test can't see: whether the committed notebooks are fit to read, and whether experiments run through papermill."
import csv, json, re
from pathlib import Path
import nbformat, papermill, pytest
from sdsel.run import run_experiment

root = Path(__file__).parent.parent
nbs = [p for p in sorted((root/'nbs').rglob('*.ipynb')) if not p.name.startswith('_') and '.ipynb_checkpoints' not in p.parts]
experiments = [p for p in nbs if p.parent.name == 'experiments']
runs = sorted((root/'figures').rglob('*.ipynb'))
read = lambda p: nbformat.read(p, as_version=4)
outputs = lambda nb: [o for c in nb.cells if c.cell_type == 'code' for o in c.outputs]

@pytest.mark.parametrize('p', nbs+runs, ids=lambda p: f'{p.parent.name}/{p.stem}')
def test_readable(p):
    nb = read(p)
    assert nb.metadata.kernelspec.language == 'python', 'nbdev_test skips any other language without a word'
    assert not [o for o in outputs(nb) if o.output_type == 'error' or o.get('name') == 'stderr']
    assert not [o for o in outputs(nb) if 'application/vnd.jupyter.widget-view+json' in o.get('data', {})]
    title = nb.cells[0].source.splitlines()
    if title[0].startswith('# '): assert all(l == '' or l[:2] in ('# ', '> ', '- ') for l in title), 'nbdev drops prose from the title cell'
    assert p.stat().st_size < 600_000
    assert max(len(c.source.splitlines()) for c in nb.cells if c.cell_type == 'code') <= 45
    assert not re.search(r'(?<![\w.])/(home|root|tmp|work)/', p.read_text()), 'a path of some machine'

@pytest.mark.parametrize('p', [p for p in nbs if p.stem != 'index'], ids=lambda p: p.stem)
def test_has_outputs(p):
    assert outputs(read(p)), 'people read this on the web: run .ci/prepare with this notebook'

@pytest.mark.parametrize('p', experiments, ids=lambda p: p.stem)
def test_parameters(p):
    cell, = [c for c in read(p).cells if c.metadata.get('tags') == ['parameters']]
    assert {'model', 'out'} <= papermill.inspect_notebook(p).keys() == set(re.findall(r'^(\w+) = ', cell.source, re.M)) # a comment with an equals sign hides its parameter

def test_papermill(tmp_path):
    out = run_experiment('analyze', 'tiny', dict(rounds=3, draws=2, tokens=500), out=tmp_path)
    names = {p.name for p in out.iterdir()}
    assert {'analyze.ipynb', 'analyze.txt', 'run.json', 'selection.json'} <= names and not [n for n in names if 'failed' in n]
    for figure in 'entropy', 'cka', 'growth', 'greedy', 'sets', 'stability', 'budget': assert {f'{figure}.csv', f'{figure}.svg', f'{figure}.png'} <= names
    text = (out/'analyze.ipynb').read_text()
    assert not [o for o in outputs(read(out/'analyze.ipynb')) if o.get('name') == 'stderr'] and '.new' not in text and not (out/'.new').exists()

def test_train_experiment(tmp_path):
    "Two shares, whole kinds held out; the record tells how."
    out = run_experiment('train', 'tiny', dict(held_out=2, n=18, layers=[2, 5], config=dict(steps=2, epochs=1, batch=6), shares=[.5, 1.], test_prompts=2), out=tmp_path)
    names = {p.name for p in out.iterdir()}
    assert {'train.ipynb', 'run.json', 'curve.csv', 'training.csv', 'speed.csv', 'positions.csv', 'kinds.csv', 'training.svg', 'curve.png', 'evaluation-known-kinds.json', 'evaluation-new-kinds.json'} <= names
    r = json.loads((out/'run.json').read_text())
    assert r['layers'] == [2, 5] and r['draft']['config']['steps'] == 2 and not set(r['tests']['known kinds']['kinds']) & set(r['tests']['new kinds']['kinds'])
    tokens = [float(x['answer_tokens']) for x in csv.DictReader((out/'curve.csv').open()) if x['test'] == 'new kinds']
    assert len(tokens) == 2 and tokens[0] < tokens[1]

def test_warnings_are_no_result(tmp_path, monkeypatch):
    monkeypatch.setattr('sdsel.run.repository', lambda: tmp_path)
    (tmp_path/'nbs'/'experiments').mkdir(parents=True)
    new = nbformat.v4.new_code_cell
    nb = nbformat.v4.new_notebook(metadata=dict(kernelspec=dict(name='python3', display_name='python3', language='python')), cells=[new("model = 'tiny'\nout = ''", metadata=dict(tags=['parameters'])), new("import warnings; warnings.warn('look'); print('said')")])
    nbformat.write(nb, tmp_path/'nbs'/'experiments'/'loud.ipynb')
    o, = outputs(read(run_experiment('loud', 'tiny', out=tmp_path/'figures')/'loud.ipynb'))
    assert (o.name, o.text.strip()) == ('stdout', 'said')

def test_failed_run_keeps_the_last_good_one(tmp_path):
    (tmp_path/'tiny').mkdir()
    good = [tmp_path/'tiny'/n for n in ('analyze.ipynb', 'layers.csv')]
    for p in good: p.write_text('good')
    with pytest.raises(RuntimeError, match='analyze failed for tiny: ValueError: .*k=99'): run_experiment('analyze', 'tiny', dict(k=99, tokens=300), out=tmp_path)
    assert all(p.read_text() == 'good' for p in good) and {p.name for p in (tmp_path/'tiny').iterdir()} == {'analyze.ipynb', 'layers.csv', 'analyze.failed.ipynb'}

def test_links_of_the_readme():
    links = re.findall(r'\]\((?!https?:|#)([^)#]+)', (root/'README.md').read_text())
    assert len(links) > 10 and not [l for l in links if not (root/l).exists()]

@pytest.mark.parametrize('p', sorted((root/'figures').rglob('run.json')), ids=lambda p: str(p.parent.relative_to(root/'figures')))
def test_committed_runs_say_how(p):
    r = json.loads(p.read_text())
    assert r['command'].startswith('sdsel run ') and {'torch', 'machine'} <= r['versions'].keys() and r['model']['revision']
