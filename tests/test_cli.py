"The command line: what each command prints, and that bad input ends in one line and exit code 2."
import io, json, warnings
import pytest
import sdsel.run
from sdsel.analysis.selection import METHODS
from sdsel.analysis.statistics import load_statistics
from sdsel.cli import main
from sdsel.layers import ENGINES, engine_ids
from sdsel.targets import tiny_target

small = '--model', 'tiny', '-n', '4', '--tokens', '64'

@pytest.fixture
def cli(capsys, monkeypatch, tmp_path):
    "Run `sdsel`: (exit code, stdout, lines of stderr but warnings)."
    monkeypatch.setenv('SDSEL_CACHE', str(tmp_path/'cache'))
    monkeypatch.setattr('sdsel.assets._try_hub', lambda i: (None, 'no hub in a test'))
    monkeypatch.setattr(warnings, 'showwarning', warnings.showwarning) # main sets it
    def run(*args):
        with pytest.raises(SystemExit) as e: main(list(args))
        out,err = capsys.readouterr()
        return e.value.code,out,[l for l in err.splitlines() if not l.startswith('warning: ')]
    return run

def good(result):
    code,out,err = result
    assert code == 0 and not [l for l in err if l.startswith('error')], err
    return out

def test_models(cli):
    text,d = good(cli('models')),json.loads(good(cli('models', '--json')))
    assert set(d) == {'models', 'data'} and d['models']['smollm2-135m'].keys() == {'hub', 'licence', 'bytes', 'disk', 'cached'}
    for name in (*d['models'], *d['data']): assert name in text

def test_analyze(cli, tmp_path):
    text = good(cli('analyze', *small))
    assert '9 boundaries, 64 tokens, filter none' in text and 'H2_debiased' in text
    out = tmp_path/'deep'/'s.json'
    d = json.loads(good(cli('analyze', *small, '--json', '--out', str(out))))
    assert [r['h'] for r in d['layers']] == list(range(9)) and d['tokens'] == 64 and d['provenance']['model'] == 'tiny-llama' and isinstance(d['warnings'], list)
    s = load_statistics(out)
    assert s.layers == tuple(range(9)) and s.tokens == 64 and s.entropy.tolist() == pytest.approx([r['H1'] for r in d['layers']])

@pytest.mark.parametrize('options,word', [(('--filter', 'high:0.5'), '32 tokens, filter high:0.5'), (('--raw',), '64 tokens'), (('--model', 'tiny-qwen3'), 'tiny-qwen3'), (('--seed', '3'), '64 tokens')])
def test_analyze_options(cli, options, word): assert word in good(cli('analyze', *small, *options))

def test_analyze_is_reproducible(cli):
    runs = [good(cli('analyze', *small, '--json', '--seed', s)) for s in '112']
    assert runs[0] == runs[1] != runs[2]

@pytest.mark.parametrize('engine', ENGINES)
def test_select(cli, engine):
    text = good(cli('select', *small, '--engine', engine))
    d = json.loads(good(cli('select', *small, '--engine', engine, '--json')))
    assert str(tuple(d['layers'])) in text and f"{engine}: {d['flags']}" in text
    for i in engine_ids(d['layers'], 8, engine): assert str(i) in d['flags']

@pytest.mark.parametrize('method', METHODS)
def test_select_methods(cli, method):
    assert method in good(cli('select', '--help-methods'))
    d = json.loads(good(cli('select', *small, '--method', method, '--json')))
    assert len(d['layers']) == 3 and d['method'] == method and 'flags' not in d

def test_fetch(cli, tmp_path):
    t = tiny_target(); t.model.save_pretrained(tmp_path/'m'); t.tokenizer.save_pretrained(tmp_path/'m')
    assert good(cli('fetch', str(tmp_path/'m'))).strip() == f"{tmp_path/'m'}: {tmp_path/'m'}"
    assert json.loads(good(cli('fetch', str(tmp_path/'m'), '--json'))) == {str(tmp_path/'m'): str(tmp_path/'m')}
    assert '4 blocks' in good(cli('select', '-n', '4', '--tokens', '64', '--model', str(tmp_path/'m')))

def test_run(cli, tmp_path, monkeypatch):
    calls = []
    def fake(notebook, model, params, out):
        if model == 'bad': raise RuntimeError(f'{notebook} failed for bad: ValueError: x')
        calls.append((notebook, model, params, out)); (tmp_path/f'{notebook}.txt').write_text('in short'); return tmp_path
    monkeypatch.setattr(sdsel.run, 'run_experiment', fake)
    text = good(cli('run', 'analyze', '--models', 'a, b', '--params', '{"tokens": 9}', '--out', 'here'))
    assert calls == [('analyze', m, dict(tokens=9), 'here') for m in 'ab'] and text.count('in short') == 2 and str(tmp_path) in text
    assert json.loads(good(cli('run', 'analyze', '--models', 'a', '--json'))) == dict(model='a', folder=str(tmp_path))
    code,out,err = cli('run', 'analyze', '--models', 'bad')
    assert code == 1 and err == ['error: analyze failed for bad: ValueError: x']

def test_generate(cli, monkeypatch):
    code,text,err = cli('generate', 'hi', '--model', 'tiny', '--method', 'lookup', '--length', 'auto', '--max-new-tokens', '12')
    assert code == 0 and text.strip() and len(err) == 1 and '12 tokens' in err[0] and 'accepted length' in err[0]
    d = json.loads(good(cli('generate', 'hi', '--model', 'tiny', '--method', 'sd', '--draft', 'first:2', '--width', '2', '--max-new-tokens', '12', '--temperature', '1', '--top-k', '9', '--seed', '3', '--json')))
    assert len(d['tokens']) == 12 and d['provenance']['draft'] == 'first:2 of tiny-llama' and d['provenance']['top_k'] == 9
    monkeypatch.setattr('sys.stdin', io.StringIO('hi'))
    same = lambda prompt: json.loads(good(cli('generate', prompt, '--model', 'tiny', '--max-new-tokens', '4', '--json')))['prompt']
    assert same('-') == same('hi')

def test_train_export_generate_evaluate(cli, tmp_path):
    "From prompts to a measured draft, each step by its command."
    options = '--model', 'tiny', '-n', '8', '--layers', '2,5', '--vocab', '64', '--steps', '2', '--epochs', '2', '--batch', '4', '--max-new-tokens', '12', '--store', 'all', '--out', str(tmp_path/'d')
    d = json.loads(good(cli('train', *options, '--json')))
    assert d['layers'] == [2, 5] and d['steps'] == 4 and d['answers'] == 8
    assert 'h=2' in good(cli('train', *options)) # all is there
    draft = d['folder']
    assert json.loads(good(cli('generate', 'hi', '--model', 'tiny', '--max-new-tokens', '8', '--json')))['tokens'] == json.loads(good(cli('generate', 'hi', '--model', 'tiny', '--method', 'eagle3', '--draft', draft, '--length', '2', '--max-new-tokens', '8', '--json')))['tokens']
    for fmt,ids in ('speculators', [2, 5]), ('eagle', [1, 4]):
        out = json.loads(good(cli('export', draft, '--out', str(tmp_path/fmt), '--format', fmt, '--model', 'tiny', '--dtype', 'bfloat16', '--json')))['folder']
        c = json.loads(open(out+'/config.json').read())
        assert c.get('eagle_config', c)['eagle_aux_hidden_state_layer_ids'] == ids
    code,_,err = cli('evaluate', '--draft', draft, '--model', 'tiny', '-n', '8')
    assert code == 2 and 'trained on all 8' in err[0], err
    r = json.loads(good(cli('evaluate', '--draft', draft, '--model', 'tiny', '-n', '20', '--seed', '5', '--most', '3', '--length', '2', '--max-new-tokens', '8', '--json', '--out', str(tmp_path/'e.json'))))
    assert r['prompts'] == 3 and not r['divergences'] and json.loads((tmp_path/'e.json').read_text())['rows'] == r['rows']
    more = json.loads(good(cli('train', *options[:-1], str(tmp_path/'e'), '--answers', str(tmp_path/'d'/'answers'), '--init', draft, '--json')))
    assert more['answers_hash'] == d['answers_hash'] and more['init'].startswith('draft ') and not (tmp_path/'e'/'answers').exists()
    assert 'accepted length' in good(cli('evaluate', '--draft', draft, '--model', 'tiny', '-n', '2', '--raw', '--length', '2', '--max-new-tokens', '8'))

def test_what_was_trained_on_is_not_measured_on(cli, tmp_path):
    "Whatever the sample and the share: prompts of the training, of `also` and of `init`."
    train,evaluate = ('train', '--model', 'tiny', '--layers', '2', '--epochs', '1', '--max-new-tokens', '6', '--store', 'online', '--json'),('evaluate', '--model', 'tiny', '--max-new-tokens', '4', '--length', '2', '--json', '--hold-out', '.5')
    same = '-n', '12', '--seed', '1'
    folder = lambda name, *more: json.loads(good(cli(*train, '--out', str(tmp_path/name), *more)))['folder']
    def left(draft, *more):
        code,out,err = cli(*evaluate, '--draft', draft, *more)
        return json.loads(out)['prompts'] if code == 0 else err[-1]
    half,every = folder('half', *same, '--hold-out', '.5'),folder('every')
    both = folder('both', *same, '--hold-out', '.5', '--also', str(tmp_path/'every'/'answers'))
    assert left(half, *same) == left(both, *same) == 6 # held out, also of what `also` holds
    assert 'trained on all 6' in left(every, *same)
    _,_,err = cli(*evaluate, '--draft', half, '--most', '2') # another sample: some of its half are known
    assert 'of 60 prompts are left out' in err[0], err
    code,_,err = cli(*train, *same, '--out', str(tmp_path/'more'), '--hold-out', '.5', '--init', every)
    assert code == 2 and 'has learnt 6 of the 6' in err[-1], err

@pytest.mark.parametrize('command', [(), ('models',), ('fetch',), ('analyze',), ('select',), ('train',), ('export',), ('evaluate',), ('generate',), ('run',)], ids=lambda c: ' '.join(c) or 'sdsel')
def test_help(cli, command):
    text = good(cli(*command, '--help'))
    assert 'Usage' in text and len(text.splitlines()) > 3

bad = {
    'unknown option': (('analyze', '--bogus', '1'), '--bogus'), 'unknown command': (('bogus',), "'bogus'"), 'not a number': (('select', '-k', 'x'), "'-k'"),
    'no names': (('fetch',), 'names'), 'no notebook': (('run',), 'notebook'), 'no models': (('run', 'analyze'), '--models'), 'empty models': (('run', 'analyze', '--models', ' ,'), 'models'),
    'model': (('analyze', '--model', 'gpt5'), "'gpt5' is unknown"), 'empty model': (('analyze', '--model', ''), 'name is empty'), 'hub id': (('analyze', '--model', 'org/x'), 'no hub in a test'),
    'family': (('analyze', '--model', 'tiny-x'), "family='x'"), 'licence': (('fetch', 'gemma3-270m'), '--accept-licence'), 'source': (('analyze', '--model', 'smollm2-135m', '--source', 'x'), "source='x'"),
    'fetch': (('fetch', 'nope'), "'nope' is unknown"), 'fetch registry': (('fetch', 'org/x', '--source', 'registry'), "'org/x'"),
    'prompts': (('analyze', '--prompts', 'nope.jsonl'), "'nope.jsonl': no such file"), 'n': (('analyze', *small, '-n', '0'), 'n=0'), 'large n': (('analyze', *small, '-n', '9999'), 'n=9999'),
    'tokens': (('analyze', *small, '--tokens', '0'), 'tokens=0'), 'few tokens': (('analyze', *small, '--tokens', '3'), 'at least 4'), 'seed': (('analyze', *small, '--seed', '-1'), 'seed=-1'),
    'filter': (('analyze', *small, '--filter', 'high'), "'high'"), 'filter kind': (('analyze', *small, '--filter', 'x:1'), "kind='x'"), 'strict filter': (('analyze', *small, '--filter', 'high:99nats'), 'keeps no token'),
    'k': (('select', *small, '-k', '0'), 'k=0'), 'large k': (('select', *small, '-k', '8'), 'k=8'), 'method': (('select', *small, '--method', 'x'), "method='x'"),
    'engine': (('select', *small, '--engine', 'x'), "engine='x'"), 'engine k': (('select', *small, '-k', '2', '--engine', 'specforge'), 'exactly 3'), 'engine k before the model': (('select', '--model', 'no-such-model', '-k', '2', '--engine', 'specforge'), 'exactly 3'), 'default k': (('select', *small, '-k', '2', '--method', 'default'), 'k=2'),
    'no folder': (('train', '--model', 'tiny'), '--out'), 'layers text': (('train', '--model', 'tiny', '--layers', 'a,b', '--out', '/nowhere'), "layers='a,b'"), 'layers out of range': (('train', '--model', 'tiny', '--layers', '2,9', '--out', '/nowhere'), 'outside'),
    'shallow': (('train', '--model', 'tiny', '--vocab', '0', '--out', '/nowhere'), 'draft_vocab_size=0'), 'schedule': (('train', '--model', 'tiny', '--schedule', 'x', '--out', '/nowhere'), "schedule='x'"), 'hold out': (('train', '--model', 'tiny', '--hold-out', '99', '--out', '/nowhere'), 'n=99'),
    'half a kind': (('train', '--model', 'tiny', '--hold-out', '2.5', '--out', '/nowhere'), 'hold_out=2.5'), 'seed of training': (('train', '--model', 'tiny', '--seed', '-1', '--out', '/nowhere'), 'seed=-1'), 'most': (('evaluate', '--draft', '/nowhere', '--most', '0'), '--most'),
    'embeddings': (('train', '--model', 'tiny', '--layers', '0,4', '--out', '/nowhere'), 'h=0'), 'also': (('train', '--model', 'tiny', '--layers', '4', '--also', '/none', '--out', '/nowhere'), 'no answers in /none'),
    'store': (('train', '--model', 'tiny', '--store', 'int4', '--out', '/nowhere'), "store='int4'"), 'no draft there': (('evaluate', '--model', 'tiny', '-n', '2', '--draft', '/nowhere'), '/nowhere'), 'export nothing': (('export', '/nowhere', '--out', '/nowhere/x'), '/nowhere'),
    'export format': (('export', '/nowhere', '--out', '/nowhere/x', '--format', 'onnx'), "format='onnx'"), 'generator': (('train', '--model', 'tiny', '--prompts', 'gym:nosuch', '--out', '/nowhere'), 'no such generator'), 'no prompt': (('generate',), 'prompt'), 'empty prompt': (('generate', '', '--model', 'tiny'), 'empty'), 'decoding method': (('generate', 'hi', '--model', 'tiny', '--method', 'x'), "method='x'"),
    'no draft': (('generate', 'hi', '--model', 'tiny', '--method', 'sd'), 'needs a draft'), 'draft': (('generate', 'hi', '--model', 'tiny', '--method', 'sd', '--draft', 'nope'), "'nope' is unknown"),
    'other draft': (('generate', 'hi', '--model', 'tiny', '--method', 'sd', '--draft', 'first:9'), 'layers=9'), 'length': (('generate', 'hi', '--model', 'tiny', '--method', 'lookup', '--length', 'long'), "length='long'"),
    'temperature': (('generate', 'hi', '--model', 'tiny', '--temperature', '-1'), 'temperature=-1'), 'new tokens': (('generate', 'hi', '--model', 'tiny', '--max-new-tokens', '0'), 'max_new_tokens=0'),
    'stop': (('generate', 'hi', '--model', 'tiny', '--stop', ''), 'stop'), 'notebook': (('run', 'nope', '--models', 'tiny'), "notebook='nope'"), 'params': (('run', 'analyze', '--models', 'tiny', '--params', '{'), "params='{'"),
    'params list': (('run', 'analyze', '--models', 'tiny', '--params', '[1]'), 'JSON object'), 'parameter': (('run', 'analyze', '--models', 'tiny', '--params', '{"zz": 1}'), "'zz'")}
@pytest.mark.parametrize('case', bad)
def test_bad_input(cli, case):
    args,word = bad[case]
    code,out,err = cli(*args)
    assert code == 2 and len(err) == 1 and err[0].startswith('error: ') and word in err[0], (code, err)

def test_bad_files(cli, tmp_path):
    for name,text,word in ('e.jsonl', '', 'empty'), ('t.jsonl', '{"prompt": "a', 'line 1'), ('s.jsonl', '3', 'row 1'), ('x.jsonl.gz', 'x', 'x.jsonl.gz'):
        (tmp_path/name).write_text(text)
        code,out,err = cli('analyze', '--model', 'tiny', '--prompts', str(tmp_path/name))
        assert code == 2 and len(err) == 1 and err[0].startswith('error: ') and name in err[0] and word in err[0], (code, err)

def test_out_is_a_folder(cli, tmp_path):
    (tmp_path/'out').mkdir(); (tmp_path/'out'/'mine.txt').write_text('x')
    code,out,err = cli('analyze', *small, '--out', str(tmp_path/'out'))
    assert (tmp_path/'out'/'mine.txt').exists() and code == 2 and len(err) == 1 and str(tmp_path/'out') in err[0], (code, err)

def test_damaged_model_folder(cli, tmp_path):
    t = tiny_target(); t.model.save_pretrained(tmp_path/'m'); t.tokenizer.save_pretrained(tmp_path/'m')
    w = tmp_path/'m'/'model.safetensors'; w.write_bytes(w.read_bytes()[:999])
    code,out,err = cli('analyze', '--model', str(tmp_path/'m'), '-n', '4')
    assert code == 2 and len(err) == 1 and 'truncated' in err[0], err

def test_no_arguments(cli):
    "Bare `sdsel` shows the help, not an error."
    code,out,err = cli()
    assert 'Usage' in out+'\n'.join(err) and not any(l.startswith('error') for l in err)
