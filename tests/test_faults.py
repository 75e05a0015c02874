"What goes wrong gets one clear line, and costs nothing that was there before."
import errno, gzip, hashlib, http.server, json, os, shutil, signal, subprocess, sys, threading, time, zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
import numpy as np
import pytest, torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
import sdsel
from sdsel import assets
from sdsel.analysis.compartments import compartments
from sdsel.analysis.filtering import TokenFilter, compare_filters, parse_filter
from sdsel.analysis.selection import Selection, select_layers
from sdsel.analysis.stability import stability, token_budget
from sdsel.analysis.states import cached_states, collect_states, load_states, save_states
from sdsel.analysis.statistics import layer_statistics, load_statistics, save_statistics
from sdsel.layers import LayerSet, candidates, default_layers, describe, evenly_spaced, upper_third
from sdsel.prompts import as_prompt, encode, fill, load_prompts, render
from sdsel.run import repository, run_experiment
from sdsel.targets import Target, byte_tokenizer, load_target, tiny_target

@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    "Nothing here may touch the user's own cache, or the network."
    monkeypatch.setenv('SDSEL_CACHE', str(tmp_path/'cache'))
    return tmp_path/'cache'

def fails(f, kind, *words):
    "The error is of this kind, is one line, and holds every word."
    with pytest.raises(kind) as e: f()
    text = str(e.value)
    assert '\n' not in text.strip(), text
    for w in words: assert str(w) in text, f'{w!r} is not in: {text}'
    return text

def leftovers(folder): return [str(p) for p in Path(folder).rglob('*') if p.name.endswith('.tmp')]

prompts = [as_prompt(dict(prompt=f'prompt number {i}: '+'words '*(3+i)), f'p{i}') for i in range(6)]

@pytest.fixture(scope='module')
def target(): return tiny_target(num_layers=8)
@pytest.fixture(scope='module')
def states(target): return collect_states(target, prompts, 100)
@pytest.fixture(scope='module')
def stats(states): return layer_statistics(states)

# ---- prompts

good = '{"prompt": "a"}\n'
@pytest.mark.parametrize('name,text,words', [
    ('e.jsonl', '', ['e.jsonl', 'empty']), ('e.json', '[]', ['e.json', 'empty']), ('blank.jsonl', '\n\n', ['blank.jsonl', 'empty']),
    ('t.jsonl', good+'{"prompt": "b', ['t.jsonl, line 2', 'truncated']), ('t.json', '[{"prompt": "a"}, {"pro', ['t.json', 'truncated']),
    ('f.jsonl', good+'{"text": "a"}', ['f.jsonl, row 2', "'prompt'", "'messages'", "['text']"]), ('i.jsonl', '{"prompt": 3}', ['i.jsonl, row 1', "'prompt'"]),
    ('b.jsonl', '{"prompt": "  "}', ['b.jsonl, row 1', 'empty']), ('r.jsonl', '{"prompt": "a", "response": 3}', ['r.jsonl, row 1', 'content']),
    ('m.jsonl', '{"messages": []}', ['m.jsonl, row 1', 'non-empty list']), ('n.jsonl', '{"messages": [{"content": "a"}]}', ['n.jsonl, row 1', "'role'"]),
    ('c.jsonl', '{"messages": [{"role": "user", "content": " "}]}', ['c.jsonl, row 1', 'empty']),
    ('scalar.jsonl', '3', ['scalar.jsonl, row 1']), ('strings.json', '["a"]', ['strings.json, row 1']),
    ('binary.jsonl', b'\xff\xfe\x00', ['binary.jsonl']), ('no.jsonl.gz', b'plain text', ['no.jsonl.gz']), ('cut.jsonl.gz', gzip.compress(good.encode()*99)[:-12], ['cut.jsonl.gz'])], ids=lambda v: v if isinstance(v, str) and v.endswith(('.jsonl', '.json', '.gz')) else '')
def test_bad_prompt_files(tmp_path, name, text, words):
    p = tmp_path/name
    p.write_bytes(text if isinstance(text, bytes) else text.encode())
    fails(lambda: load_prompts(p), ValueError, *words)

def test_prompt_arguments(tmp_path):
    (p := tmp_path/'p.jsonl').write_text(good)
    for n in 0, -1, 1.5, True, '2': fails(lambda: load_prompts(p, n), ValueError, f'n={n!r}', '>= 1')
    fails(lambda: load_prompts(p, 5), ValueError, 'n=5', 'p.jsonl', 'only 1')
    for missing in tmp_path/'q.jsonl', 'nothing', 'no/such.jsonl': fails(lambda: load_prompts(missing), FileNotFoundError, str(missing), 'no such file', 'builtin')
    assert len(load_prompts(p, 1)) == 1
    with pytest.raises(KeyError): fill('{a} {zz}', dict(a=1))

def test_no_template_and_slow_tokenizer(target):
    tok = byte_tokenizer(); tok.chat_template = None
    fails(lambda: encode(tok, prompts), ValueError, 'no chat template', 'raw=True', '--raw')
    assert len(collect_states(Target(target.model, tok, 'x', target.provenance), prompts, 50, raw=True)) == 50
    fails(lambda: encode(SimpleNamespace(is_fast=False), prompts), ValueError, 'fast tokenizer')
    fails(lambda: encode(byte_tokenizer(), []), ValueError, 'prompts is empty')
    with pytest.warns(UserWarning, match='6 of 6 prompts were cut to max_length=8'): encode(byte_tokenizer(), prompts, max_length=8)

def test_rewriting_template(target):
    tok = byte_tokenizer()
    tok.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content if loop.last else '...' }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    turns = [dict(role=r, content=c) for r,c in (('user', 'a'), ('assistant', 'b'), ('user', 'c'))]
    fails(lambda: render(tok, turns), ValueError, 'rewrites earlier turns', 'message 1', 'raw=True')
    assert render(tok, turns, raw=True) == ('abc', [(1, 2)])

# ---- states

@pytest.mark.parametrize('ids,words', [([-1], ['-1', '0..8']), ([9], ['9', '0..8']), ([2, 2], ['[2, 2]', 'repeats']), ([1.5], ['1.5', 'whole numbers']), ([True], ['True']),
                                       ('25', ["'2'"]), ([None], ['None']), ([], ['empty']), (3, ['layers=3', 'list'])])
def test_wrong_layers(target, ids, words): fails(lambda: collect_states(target, prompts, 50, layers=ids), ValueError, 'layers', *words)

@pytest.mark.parametrize('options,words', [(dict(tokens=0), ['tokens=0', '>= 1']), (dict(tokens=9.), ['tokens=9.0']), (dict(drop_first=-1), ['drop_first=-1']), (dict(max_length=1), ['max_length=1']),
    (dict(batch_tokens=0), ['batch_tokens=0']), (dict(on='answer'), ["on='answer'", "'response'"]), (dict(on='response'), ['all zero', "'response'"]), (dict(seed=-1), ['seed=-1']),
    (dict(drop_first=500), ['no token is left', '501'])], ids=lambda v: '-'.join(map(str, *v.items())) if isinstance(v, dict) else '')
def test_wrong_options(target, options, words): fails(lambda: collect_states(target, prompts, **{'tokens': 50, **options}), ValueError, *words)

def test_prompts_the_model_does_not_know(target):
    tok = byte_tokenizer(); tok.add_tokens(['<zz>'])
    fails(lambda: collect_states(Target(target.model, tok, 'tinyx'), [as_prompt(dict(prompt='hello <zz> world'), 'w')]), ValueError, 'tokenizer mismatch', 'token 257', 'tinyx embeds only 257')
    fails(lambda: collect_states(Target(target.model, None, 'tinyx'), prompts), ValueError, 'tinyx has no tokenizer')
    fails(lambda: collect_states(target, [as_prompt(dict(prompt='ab'), 'w')], raw=True), ValueError, 'no token is left', '1 prompts')

def test_prompts_longer_than_the_model():
    "Learned positions end somewhere: longer prompts are cut with a warning, like those over max_length."
    t = tiny_target('opt', max_position_embeddings=512)
    with pytest.warns(UserWarning, match='cut to max_length=512'): s = collect_states(t, [as_prompt(dict(prompt='word '*200), 'w')], 999)
    assert len(s) == 507 and s.position.max() == 510

@pytest.mark.parametrize('value', [float('nan'), float('inf')])
def test_nan_and_inf_in_weights(value):
    t = tiny_target(num_layers=4)
    t.model.model.layers[2].mlp.down_proj.weight[0,0] = value
    fails(lambda: collect_states(t, prompts, 50), FloatingPointError, 'boundary 3', "prompt 'p", 'float32')
    fails(lambda: collect_states(t, prompts, 50, layers=[1]), FloatingPointError, 'boundary final')

def test_bad_states(states):
    def spoil(value, k=3): x = states.x.clone(); x[k,5,2] = value; return replace(states, x=x)
    fails(lambda: layer_statistics(spoil(float('nan'))), FloatingPointError, 'boundary 3', 'float32')
    fails(lambda: layer_statistics(spoil(float('inf'), 0)), FloatingPointError, 'boundary 0')
    fails(lambda: layer_statistics(replace(states, future=states.future*float('nan'))), FloatingPointError, 'boundary final')
    x = states.x.clone(); x[4] = 1.
    fails(lambda: layer_statistics(replace(states, x=x)), ValueError, 'boundary 4', 'constant')
    fails(lambda: states.layer(99), ValueError, 'h=99', 'not captured')

def test_too_few_tokens(states):
    for n in 1,3:
        text = fails(lambda: layer_statistics(states.take(slice(0, n))), ValueError, 'at least 4', f'{n} ')
        assert 'chunk' not in text, 'nobody gave a chunk'
    fails(lambda: layer_statistics(states, [0, 1, 2]), ValueError, 'keeps 3 of 100', 'at least 4')
    for c in 3,101: fails(lambda: layer_statistics(states, chunk=c), ValueError, f'chunk={c}', 'between 4', '100')
    fails(lambda: collect_states(tiny_target(), prompts[:1], 0), ValueError, 'tokens=0')

@pytest.mark.parametrize('bad', [np.ones(5, bool), [0, 1, 2, 3, 1000], 'high:0.5'], ids=['mask', 'index', 'text'])
def test_wrong_filters(states, bad): fails(lambda: layer_statistics(states, bad), ValueError, 'filter')

def test_filter_arguments(states):
    for text,words in {'x:0.5': ["'x'", "'high'"], 'high': ["'high'", "'high:0.5'"], 'high:2': ['2.0', '(0, 1]'], 'random:2nats': ['random', 'fraction'], 'low:nan': ['nan']}.items():
        fails(lambda: parse_filter(text), ValueError, *words)
    fails(lambda: parse_filter('high:99nats')(states), ValueError, 'high:99nats', 'keeps no token', 'nats')
    fails(lambda: TokenFilter('high'), ValueError, 'fraction', 'threshold')
    fails(lambda: compare_filters(states, [None, TokenFilter('high', .5)], 99), ValueError, 'tokens=99', 'high:0.5', 'only 50')

# ---- depth

def test_shallow_models():
    for L in range(1, 7): fails(lambda: default_layers(L), ValueError, f'num_layers={L}', '7 blocks')
    for L in 0, -1, 2.5, True, '8': fails(lambda: default_layers(L), ValueError, f'num_layers={L!r}')
    fails(lambda: candidates(1), ValueError, 'num_layers=1', '2 blocks')
    for f in evenly_spaced, upper_third:
        for k in 0, 4, 2., True: fails(lambda: f(4, k), ValueError, f'k={k!r}', 'between 1 and 3')
    one,four = (layer_statistics(collect_states(tiny_target(num_layers=L), prompts, 60)) for L in (1, 4))
    fails(lambda: select_layers(one, 1), ValueError, 'num_layers=1', '2 blocks')
    fails(lambda: compartments(one), ValueError, 'too few', 'needs 3')
    fails(lambda: select_layers(four, 3, 'default'), ValueError, 'num_layers=4', '7 blocks')
    for k in 0, 4, 2., True: fails(lambda: select_layers(four, k), ValueError, f'k={k!r}', 'between 1 and 3')
    assert select_layers(four, 3).layers == (1, 2, 3)
    fails(lambda: describe(9, 8), ValueError, '9', '0..8')
    fails(lambda: LayerSet((2, 99), 8), ValueError, '99', '0..8')

def test_wrong_selection(stats, tmp_path):
    for kw,words in ((dict(method='x'), ["method='x'", 'exhaustive-entropy']), (dict(objective='x'), ["objective='x'", 'logdet']), (dict(search='x'), ["search='x'", "'greedy'"]),
                     (dict(objective='logdet', search='shortlist'), ['shortlist', 'logdet']), (dict(candidates=[0, 1, 2]), ['candidates', '0', '1..7']),
                     (dict(candidates=[1, 1, 2]), ['candidates', 'repeats']), (dict(limit=5), ['limit=5', '20 subsets']), (dict(k=2, method='default'), ['k=2', 'three'])):
        fails(lambda: select_layers(stats, **kw), ValueError, *words)
    fails(lambda: select_layers(stats).flags('x'), ValueError, "engine='x'", 'vllm')
    fails(lambda: select_layers(stats, 2).flags('specforge'), ValueError, 'specforge', 'exactly 3')
    loaded = load_statistics(save_statistics(stats, tmp_path/'s.json'))
    for method in 'exhaustive-entropy','coding-rate': fails(lambda: select_layers(loaded, 3, method), ValueError, 'needs the states', 'layer_statistics')
    fails(lambda: loaded.subset_entropy([1, 2]), ValueError, 'alpha=1', 'needs the states')

def test_wrong_resampling(target, states):
    fails(lambda: stability(collect_states(target, prompts[:3], 60)), ValueError, '3 prompts', 'at least 4')
    fails(lambda: token_budget(states, method='default'), ValueError, "method='default'")
    fails(lambda: compartments(layer_statistics(states), 99), ValueError, 'blocks=99', '7')

# ---- files

def test_no_folder_is_replaced_by_a_file(states, stats, tmp_path):
    "A path that turns out to be somebody's folder is refused, not emptied."
    for save in (lambda p: save_statistics(stats, p)), select_layers(stats).save, (lambda p: save_states(states, p)):
        (folder := tmp_path/'results').mkdir(exist_ok=True); (folder/'mine.txt').write_text('years of work')
        with pytest.raises(OSError, match='results'): save(folder)
        assert (folder/'mine.txt').read_text() == 'years of work' and not leftovers(tmp_path)

tensors = 'x', 'future', 'entropy', 'token', 'position', 'prompt', 'first_norm'
@pytest.mark.parametrize('damage', ['half', 'header', 'empty', 'text', 'foreign', 'no tensors', 'no provenance', 'list'])
def test_damaged_states(states, tmp_path, damage):
    p = save_states(states, tmp_path/'s.safetensors'); b = p.read_bytes()
    raw = dict(half=b[:len(b)//2], header=b[:8]+bytes(255-c for c in b[8:40])+b[40:], empty=b'', text=b'{"a": 1} and more')
    whole = {k: getattr(states, k).contiguous() for k in tensors}
    if damage in raw: p.write_bytes(raw[damage])
    if damage == 'foreign': save_file({'a': torch.zeros(2)}, p)
    if damage == 'no tensors': save_file({'a': torch.zeros(2)}, p, {'sdsel': '{}'})
    if damage == 'no provenance': save_file(whole, p, {'sdsel': '{}'})
    if damage == 'list': save_file(whole, p, {'sdsel': '[1]'})
    fails(lambda: load_states(p), ValueError, p, 'damaged', 'collect again')

def test_other_states(states, target, tmp_path):
    p = save_states(states, tmp_path/'s.safetensors')
    assert torch.equal(load_states(p, target).x, states.x)
    fails(lambda: load_states(p, tiny_target(num_layers=4)), ValueError, p, 'llama-8-32-0', 'not of tiny-llama', 'collect again')
    save_states(replace(states, provenance={**states.provenance, 'convention': 'other'}), p)
    fails(lambda: load_states(p), ValueError, p, 'other', 'collect again')
    fails(lambda: load_states(tmp_path/'none'), FileNotFoundError, tmp_path/'none', 'collect and save')

texts = dict(half=lambda t: t[:len(t)//2], empty=lambda t: '', list=lambda t: '[1]', string=lambda t: '"a"', number=lambda t: '3', foreign=lambda t: '{"a": 1}', binary=lambda t: b'\xb8\xff\x00',
             extra=lambda t: json.dumps({**json.loads(t), 'zz': 1}))
@pytest.mark.parametrize('damage', texts)
def test_damaged_statistics(stats, tmp_path, damage):
    p = save_statistics(stats, tmp_path/'s.json')
    t = texts[damage](p.read_text()); p.write_bytes(t if isinstance(t, bytes) else t.encode())
    fails(lambda: load_statistics(p), ValueError, p, 'damaged', 'anew')

@pytest.mark.parametrize('field,value', [('diagnostics', [1]), ('entropy', [1., 2.]), ('layers', [0, 1]), ('layers', None), ('num_layers', 3)])
def test_inconsistent_statistics(stats, tmp_path, field, value):
    p = save_statistics(stats, tmp_path/'s.json')
    p.write_text(json.dumps({**json.loads(p.read_text()), field: value}))
    fails(lambda: load_statistics(p), ValueError, p, 'damaged')

@pytest.mark.parametrize('damage', texts)
def test_damaged_selection(stats, tmp_path, damage):
    p = tmp_path/'s.json'; select_layers(stats).save(p)
    t = texts[damage](p.read_text()); p.write_bytes(t if isinstance(t, bytes) else t.encode())
    fails(lambda: Selection.load(p), ValueError, 'not a saved selection', p)

def test_impossible_selection(stats):
    d = json.loads(select_layers(stats).to_json())
    for field,value,word in (('layers', [1, 99], '99'), ('layers', None, 'None'), ('num_layers', 'x', "'x'"), ('layers', [1.5], '1.5')):
        fails(lambda: Selection.from_json(json.dumps({**d, field: value})), ValueError, field, word)

def test_statistics_of_missing_files(tmp_path):
    for f in load_statistics, Selection.load: fails(lambda: f(tmp_path/'none.json'), FileNotFoundError, 'none.json')

full = [OSError(errno.ENOSPC, 'No space left on device'), SafetensorError('Error while serializing: I/O error: No space left on device (os error 28)')]
@pytest.mark.parametrize('error', full, ids=['OSError', 'SafetensorError'])
def test_disk_full_while_saving(states, tmp_path, monkeypatch, error):
    p = save_states(states, tmp_path/'s.safetensors'); before = p.read_bytes()
    def cut(tensors, path, *_): Path(path).write_bytes(b'half'); raise error
    monkeypatch.setattr('safetensors.torch.save_file', cut)
    fails(lambda: save_states(states.take(slice(0, 9)), p), OSError, 'disk full', p, 'free some space', 'untouched')
    assert p.read_bytes() == before and not leftovers(tmp_path)

def test_other_errors_while_saving(states, tmp_path, monkeypatch):
    p = save_states(states, tmp_path/'s.safetensors'); before = p.read_bytes()
    for error in SafetensorError('odd'), KeyboardInterrupt():
        def cut(tensors, path, *_): Path(path).write_bytes(b'half'); raise error
        monkeypatch.setattr('safetensors.torch.save_file', cut)
        with pytest.raises(type(error)): save_states(states, p)
        assert p.read_bytes() == before and not leftovers(tmp_path)

def test_disk_full_before_saving(states, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, 'disk_usage', lambda p: SimpleNamespace(free=10))
    text = fails(lambda: save_states(states, tmp_path/'new'/'s.safetensors'), OSError, 'the sample of states s.safetensors needs', tmp_path, '0.00 GB free', 'SDSEL_CACHE')
    assert str(errno.ENOSPC) in text and not (tmp_path/'new').exists()
    with pytest.raises(OSError) as e: assets.need_space(tmp_path, 3*10**9, 'a thing')
    assert e.value.errno == errno.ENOSPC and 'a thing needs 3.00 GB' in str(e.value)
    assets.need_space(tmp_path, 10, 'a thing')

# ---- folders of models

@pytest.fixture(scope='module')
def saved(tmp_path_factory):
    "A tiny model as save_pretrained writes it."
    t,folder = tiny_target(),tmp_path_factory.mktemp('saved')
    t.model.save_pretrained(folder); t.tokenizer.save_pretrained(folder)
    return folder

def weights(change):
    def do(folder):
        s = load_file(f := folder/'model.safetensors'); change(s); save_file(s, f, {'format': 'pt'})
    return do
def binary(change, name='model.safetensors'): return lambda folder: (folder/name).write_bytes(change((folder/name).read_bytes()))
def drop(s): del s['model.layers.2.mlp.up_proj.weight']
def reshape(s): s['model.layers.2.mlp.up_proj.weight'] = s['model.layers.2.mlp.up_proj.weight'][:3].clone()
def spoil(s): s['model.layers.2.mlp.up_proj.weight'][0,0] = float('nan')
def text(name, t): return lambda folder: (folder/name).write_text(t)
def more_tokens(folder): t = byte_tokenizer(); t.add_tokens(['<a>', '<b>']); t.save_pretrained(folder)
def pickled(folder): (folder/'model.safetensors').rename(folder/'pytorch_model.bin')
def no_tokenizer(folder): [p.unlink() for p in folder.glob('tokenizer*')]

@pytest.mark.parametrize('damage,kind,words', [
    (binary(lambda b: b[:len(b)//2]), OSError, ['corrupt or truncated', 'fetch again']), (binary(lambda b: b[:5]), OSError, ['corrupt or truncated']),
    (binary(lambda b: b''), OSError, ['corrupt or truncated']), (binary(lambda b: b[:8]+bytes(255-c for c in b[8:60])+b[60:]), OSError, ['corrupt or truncated']),
    (weights(drop), OSError, ['lacks 1 weights', 'model.layers.2.mlp.up_proj.weight']), (weights(lambda s: [s.pop(k) for k in list(s)[1:]]), OSError, ['lacks', 'random']),
    (weights(reshape), (OSError, ValueError), ['model.layers.2.mlp.up_proj.weight']), (weights(spoil), (OSError, ValueError, FloatingPointError), ['NaN']),
    (more_tokens, ValueError, ['tokenizer mismatch', '259 tokens', 'embeds only 257']), (pickled, ValueError, ['no .safetensors weights', 'save_pretrained']),
    (lambda f: (f/'config.json').unlink(), ValueError, ['without config.json']), (text('config.json', '{"mod'), OSError, ['config.json', 'not a valid JSON']),
    (text('config.json', '{}'), ValueError, ['model_type']), (text('config.json', '{"model_type": "zzz"}'), ValueError, ['zzz']), (text('config.json', '{"model_type": "t5"}'), ValueError, ['T5Config']),
    (no_tokenizer, OSError, ['no usable tokenizer']), (binary(lambda b: b[:200], 'tokenizer.json'), OSError, ['no usable tokenizer']), (text('tokenizer.json', '{}'), OSError, ['no usable tokenizer']),
    (text('tokenizer.json', '{"added_tokens": [], "model": {"type": "X"}}'), OSError, ['no usable tokenizer'])],
    ids=['half', 'stump', 'empty', 'flipped', 'missing key', 'only one key', 'wrong shape', 'nan', 'more tokens', 'pickle', 'no config', 'cut config', 'empty config', 'unknown config', 'encoder-decoder',
         'no tokenizer', 'cut tokenizer', 'empty tokenizer', 'odd tokenizer'])
def test_damaged_model_folder(saved, tmp_path, damage, kind, words):
    folder = shutil.copytree(saved, tmp_path/'m'); damage(folder)
    with pytest.raises(kind) as e: load_target(folder)
    for w in words: assert w in str(e.value), str(e.value)
    if words[0] not in ('model_type', 'zzz', 'T5Config'): assert str(folder) in str(e.value) # transformers words these itself

def test_good_model_folder(saved, monkeypatch):
    t = load_target(saved)
    assert t.provenance['source'] == 'folder' and torch.equal(t.model.lm_head.weight, tiny_target().model.lm_head.weight)
    fails(lambda: load_target(saved, dtype='float99'), ValueError, "dtype='float99'", 'bfloat16')
    fails(lambda: load_target(saved, source='x'), ValueError, "source='x'", "'registry'")
    fails(lambda: load_target(saved, device='gpu'), ValueError, "device='gpu'")

@pytest.mark.parametrize('name', ['', '  ', None, 3])
def test_empty_name(name): fails(lambda: assets.resolve(name), ValueError, 'name', 'hub id')

def test_unknown_names(monkeypatch):
    fails(lambda: assets.resolve('gpt5'), ValueError, "'gpt5' is unknown", 'smollm2-135m')
    monkeypatch.setattr(assets, '_try_hub', lambda i: (None, 'ConnectError: no route'))
    for source in 'auto','hub': fails(lambda: assets.resolve('org/name', source), ValueError, "'org/name'", 'ConnectError: no route', 'smollm2-135m')
    fails(lambda: assets.resolve('smollm2-135m', 'hub'), ValueError, "'smollm2-135m'", 'no route')
    fails(lambda: assets.resolve('org/name', 'registry'), ValueError, "'org/name'", 'smollm2-135m')
    fails(lambda: assets.resolve('gemma3-270m'), ValueError, 'Gemma Terms', 'https://', 'accept_licence=True', '--accept-licence')
    fails(lambda: tiny_target('lama'), ValueError, "family='lama'", 'llama')
    fails(lambda: assets.fetch_data('nope'), ValueError, "data set 'nope'", 'gsm8k')

def test_only_tiny_is_random(monkeypatch, saved, tmp_path):
    "A real model whose name starts with 'tiny' must not become a random one."
    monkeypatch.setattr(assets, '_try_hub', lambda i: (None, 'ConnectError: no route'))
    fails(lambda: cached_states('tiny-lama', n=4), ValueError, "'lama'")
    monkeypatch.chdir(tmp_path); shutil.copytree(saved, 'tinymodel')
    assert cached_states('tinymodel', n=4, tokens=50).num_layers == 4
    fails(lambda: cached_states('tinyllama/chat', n=4, tokens=50), ValueError, "'tinyllama/chat'", 'no route')

def test_cache_of_states_recovers(saved, cache, monkeypatch):
    calls = []
    monkeypatch.setattr('sdsel.analysis.states.load_target', lambda *a: calls.append(a) or load_target(*a))
    get = lambda **k: cached_states(str(saved), n=4, tokens=50, **k)
    first = get(); p, = (cache/'states').glob('*.safetensors')
    assert torch.equal(get().x, first.x) and len(calls) == 1
    for bad in p.read_bytes()[:-9], p.read_bytes()[:100], b'': # truncated anywhere
        p.write_bytes(bad)
        assert torch.equal(get().x, first.x) and torch.equal(load_states(p).x, first.x)
    assert len(calls) == 4 and not leftovers(cache)
    get(seed=1); assert len(list((cache/'states').glob('*'))) == 2

# ---- the registry

CONVERT = '''
def convert(gguf, out, tied):
    (out/'model.safetensors').write_bytes(gguf.read_bytes())
    (out/'config.json').write_text('{}')
'''
exec(CONVERT)

class Registry:
    "A manifest with one model in two wheels and one data set, and a pip that copies wheels from a shop."
    def __init__(self, tmp, cache):
        self.shop,self.data,self.cache,self.calls,self.down = tmp/'shop',tmp/'data',cache,[],()
        self.shop.mkdir(); self.data.mkdir()
        self.files = {'fake-a': b'GGUF first '*500, 'fake-b': os.urandom(4000), 'fake-set': b'{"prompt": "a"}\n{"prompt": "b"}\n'}
        self.inner = {n: hashlib.sha256(b).hexdigest() for n,b in self.files.items()}
        for n,b in self.files.items():
            with zipfile.ZipFile(self.wheel(n), 'w', zipfile.ZIP_DEFLATED) as z: z.writestr(f'pkg/{n}.bin', b)
        self.joined = hashlib.sha256(self.files['fake-a']+self.files['fake-b']).hexdigest()
        self.write()
    def wheel(self, n): return self.shop/f"{n.replace('-', '_')}-1.0-py3-none-any.whl"
    def write(self, accept='', **digests):
        hashes = {n: digests.get(n) or assets.sha256(self.wheel(n)) for n in self.files}
        part = lambda n: f'{{ wheel = "{n}==1.0", sha256 = "{hashes[n]}", path = "pkg/{n}.bin" }}'
        (self.data/'assets.toml').write_text(f'[models.fake]\nhub = "org/fake"\nlicence = "Some Terms"\nsha256 = "{digests.get("joined") or self.joined}"\nsize = 9500\ndisk = 9500\ntied = true\n'
            f'{accept}parts = [{part("fake-a")}, {part("fake-b")}]\n[data.set]\nkind = "k"\nlicence = "MIT"\nwheel = "fake-set==1.0"\nsha256 = "{hashes["fake-set"]}"\nprompt = "{{prompt}}"\n'
            f'files = [{{ path = "pkg/fake-set.bin", sha256 = "{digests.get("inner") or self.inner["fake-set"]}" }}]\n')
    def pip(self, args, **kw):
        name = args[-1].partition('==')[0]
        self.calls.append(name)
        if name in self.down: return SimpleNamespace(returncode=1, stderr=f'WARNING: x\nERROR: No matching distribution found for {args[-1]}\n')
        shutil.copy(self.wheel(name), args[args.index('--dest')+1])
        return SimpleNamespace(returncode=0, stderr='')
    @property
    def folder(self): return self.cache/'models'/'fake'
    @property
    def downloads(self): return sorted(p.name for p in (self.cache/'downloads').rglob('*.whl'))
    def check(self, r):
        assert (r.source, r.revision, r.path) == ('registry', self.joined, self.folder)
        assert (self.folder/'model.safetensors').read_bytes() == self.files['fake-a']+self.files['fake-b']
        assert not self.downloads and not leftovers(self.cache)
    def script(self, convert, *more):
        "A process of its own that resolves the model."
        code = '\n'.join(['import os, sys, time', 'from pathlib import Path', 'from sdsel import assets', f'assets.data_dir = lambda: Path({str(self.data)!r})', CONVERT, convert,
                          'assets.convert_gguf = convert', "assets._try_hub = lambda i: (None, 'no hub')", *more, "print(assets.resolve('fake').path)"])
        return subprocess.Popen([sys.executable, '-c', code], env={**os.environ, 'SDSEL_CACHE': str(self.cache)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    def stock(self, *names):
        "Wheels as if downloaded before."
        for n in names: (f := self.cache/'downloads'/'fake').mkdir(parents=True, exist_ok=True); shutil.copy(self.wheel(n), f)

@pytest.fixture
def registry(tmp_path, cache, monkeypatch):
    r = Registry(tmp_path, cache)
    monkeypatch.setattr(assets, 'data_dir', lambda: r.data)
    monkeypatch.setattr(assets, 'convert_gguf', convert)
    monkeypatch.setattr(assets.subprocess, 'run', r.pip)
    monkeypatch.setattr(assets, '_try_hub', lambda i: (None, 'no hub'))
    return r

def test_registry_model(registry):
    for name in 'fake','org/fake': registry.check(assets.resolve(name)) # parts joined in order, once
    assert registry.calls == ['fake-a', 'fake-b']
    (registry.folder/'model.safetensors').write_bytes(b'cut')
    registry.check(assets.resolve('fake')) # a truncated file is noticed
    assert len(registry.calls) == 4

def test_finished_parts_are_kept(registry):
    registry.down = 'fake-b',
    fails(lambda: assets.resolve('fake'), OSError, 'could not download fake-b==1.0', 'No matching distribution', 'network', 'kept')
    assert registry.calls == ['fake-a', 'fake-b'] and not registry.folder.exists()
    registry.down = ()
    registry.check(assets.resolve('fake'))
    assert registry.calls == ['fake-a', 'fake-b', 'fake-b']

def test_wrong_wheel(registry):
    registry.write(**{'fake-a': '0'*64})
    fails(lambda: assets.resolve('fake'), ValueError, 'fake_a-1.0-py3-none-any.whl', 'sha256', '0'*16, 'not used')
    assert not registry.downloads and not registry.folder.exists()
    registry.write(); registry.stock('fake-a')
    next((registry.cache/'downloads').rglob('*.whl')).write_bytes(b'half a wheel')
    registry.check(assets.resolve('fake')) # a truncated download is fetched anew

def test_wrong_joined_file(registry):
    registry.write(joined='0'*64)
    fails(lambda: assets.resolve('fake'), ValueError, 'joined model file of fake', 'sha256', '0'*16)
    assert not registry.folder.exists() and not leftovers(registry.cache)

def flip(b): # damage the compressed data, not the directory
    b = bytearray(b)
    for i in range(60, 66): b[i] ^= 255
    return bytes(b)
@pytest.mark.parametrize('damage', [lambda b: b'no zip', lambda b: b[:len(b)//2], flip], ids=['text', 'half', 'flipped'])
def test_damaged_wheel(registry, damage):
    "Even when the manifest itself was made from the damaged wheel."
    w = registry.wheel('fake-a'); w.write_bytes(damage(w.read_bytes())); registry.write()
    fails(lambda: assets.resolve('fake'), ValueError, w.name, 'damaged', 'pkg/fake-a.bin')
    assert not registry.folder.exists() and not leftovers(registry.cache)

def test_wheel_without_the_file(registry):
    with zipfile.ZipFile(w := registry.wheel('fake-a'), 'w') as z: z.writestr('other', 'x')
    registry.write()
    fails(lambda: assets.resolve('fake'), ValueError, w.name, 'lacks pkg/fake-a.bin')

def test_licence(registry):
    registry.write('accept = "https://example.org/terms"\n')
    fails(lambda: assets.resolve('fake'), ValueError, 'Some Terms', 'https://example.org/terms', 'accept_licence=True')
    assert not registry.calls
    registry.check(assets.resolve('fake', accept_licence=True))

def test_manifest_is_strict(registry):
    registry.write('typo = 3\n')
    with pytest.raises(ValueError, match='typo'): assets.manifest()

def test_disk_full_before_fetching(registry, monkeypatch):
    monkeypatch.setattr(shutil, 'disk_usage', lambda p: SimpleNamespace(free=20_000))
    fails(lambda: assets.resolve('fake'), OSError, 'fake (download, joined file and float32 folder) needs', 'SDSEL_CACHE')
    assert not registry.calls

@pytest.mark.parametrize('error,words', [(full[0], ['disk full', 'models/fake', 'free some space']), (full[1], ['disk full']), (ValueError('bad tensor'), ['bad tensor'])], ids=['OSError', 'SafetensorError', 'other'])
def test_failing_conversion(registry, monkeypatch, error, words):
    def cut(gguf, out, tied): (out/'model.safetensors').write_bytes(b'half'); raise error
    monkeypatch.setattr(assets, 'convert_gguf', cut)
    fails(lambda: assets.resolve('fake'), (OSError, ValueError), *words)
    assert not registry.folder.exists() and not leftovers(registry.cache) and len(registry.downloads) == 2
    monkeypatch.setattr(assets, 'convert_gguf', convert)
    registry.check(assets.resolve('fake'))
    assert registry.calls == ['fake-a', 'fake-b'] # nothing is downloaded again

def test_two_processes_convert_once(registry, tmp_path):
    registry.stock('fake-a', 'fake-b')
    slow = f'''
fast = convert
def convert(*a):
    with open({str(tmp_path/'count')!r}, 'a') as f: f.write('once\\n')
    time.sleep(.5); fast(*a)'''
    for p in [registry.script(slow) for _ in range(2)]:
        out,err = p.communicate(timeout=30)
        assert p.returncode == 0 and Path(out.strip()) == registry.folder, err
    assert (tmp_path/'count').read_text() == 'once\n'
    registry.check(assets.resolve('fake'))

def test_killed_conversion(registry, tmp_path):
    registry.stock('fake-a', 'fake-b')
    p = registry.script(f'''
def convert(gguf, out, tied):
    (out/'model.safetensors').write_bytes(b'half'); Path({str(tmp_path/'started')!r}).touch(); time.sleep(60)''')
    for _ in range(200):
        if (tmp_path/'started').exists() or p.poll() is not None: break
        time.sleep(.05)
    os.kill(p.pid, signal.SIGKILL); p.communicate()
    assert (tmp_path/'started').exists() and not registry.folder.exists() and leftovers(registry.cache)
    registry.check(assets.resolve('fake')) # which also finds no leftovers
    assert not registry.calls

def test_data_set(registry):
    out, = assets.fetch_data('set')
    assert [p.messages[0]['content'] for p in load_prompts(out)] == ['a', 'b']
    assert assets.fetch_data('set') == [out] and registry.calls == ['fake-set']
    out.write_bytes(b'cut')
    assets.fetch_data('set'); assert out.read_bytes() == registry.files['fake-set'] and not registry.downloads
    registry.write(inner='0'*64); before = out.read_bytes()
    fails(lambda: assets.fetch_data('set'), ValueError, 'pkg/fake-set.bin', 'fake-set==1.0', 'sha256')
    assert out.read_bytes() == before and not leftovers(registry.cache)
    registry.down = 'fake-set',; registry.write(); out.unlink(); shutil.rmtree(registry.cache/'downloads', ignore_errors=True)
    fails(lambda: assets.fetch_data('set'), OSError, 'could not download fake-set==1.0')

# ---- the hub

class Hub(http.server.BaseHTTPRequestHandler):
    "As much of a model hub as its own client needs: one repository, one commit."
    sha,files,lie = 'c0ffee'*6+'abcd',{},False
    def log_message(self, *a): pass
    def do_GET(self, body=True):
        path = self.path.split('?')[0]
        digest = lambda b: ('0'*64 if self.lie else hashlib.sha256(b).hexdigest())
        lfs = lambda n,b: dict(lfs=dict(oid=digest(b), sha256=digest(b), size=len(b), pointerSize=130)) if n.endswith('.safetensors') else {}
        head,out,code = {},b'',200
        if path.startswith('/api/models/org/fake/tree/'): out = [dict(type='file', path=n, oid=hashlib.sha1(b).hexdigest(), size=len(b), **lfs(n, b)) for n,b in self.files.items()]
        elif path.startswith('/api/models/org/fake'): out = dict(id='org/fake', modelId='org/fake', sha=self.sha, siblings=[dict(rfilename=n, size=len(b), blobId='0'*40, **lfs(n, b)) for n,b in self.files.items()])
        elif path.startswith('/org/fake/resolve/') and path.rpartition('/')[2] in self.files:
            out = self.files[path.rpartition('/')[2]]; head = {'X-Repo-Commit': self.sha, 'ETag': f'"{hashlib.sha256(out).hexdigest()}"'}
        else: code = 404
        out = out if isinstance(out, bytes) else json.dumps(out).encode()
        self.send_response(code)
        for k,v in {**head, 'Content-Length': len(out), 'Content-Type': 'application/json'}.items(): self.send_header(k, v)
        self.end_headers()
        if body: self.wfile.write(out)
    def do_HEAD(self): self.do_GET(False)

@pytest.fixture
def hub(tmp_path, cache):
    "Ask a hub of our own for 'org/fake', each time in a fresh process; gives (exit code, output)."
    class Own(Hub): files = {'config.json': b'{}', 'model.safetensors': b'weights', 'README.md': b'about', 'model.gguf': b'other format'}
    server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Own)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    code = "from sdsel import assets\ntry: r = assets.resolve('org/fake', 'hub'); print(r.source, r.revision, (r.path/'model.safetensors').read_text(), *sorted(p.name for p in r.path.iterdir()))\nexcept (ValueError, OSError) as e: print('error:', e)"
    def ask(up=True):
        env = {**os.environ, 'HF_ENDPOINT': f'http://127.0.0.1:{server.server_port if up else 9}', 'HF_HOME': str(tmp_path/'hf'), 'HF_HUB_DISABLE_XET': '1', 'HF_HUB_DISABLE_TELEMETRY': '1', 'NO_PROXY': '*', 'no_proxy': '*'}
        env.pop('HF_HUB_OFFLINE', None)
        r = subprocess.run([sys.executable, '-W', 'ignore', '-c', code], env=env, capture_output=True, text=True, timeout=60)
        assert r.returncode == 0, r.stderr
        return r.stdout.strip()
    ask.server = Own
    yield ask
    server.shutdown(); server.server_close()

def test_hub_model(hub):
    want = f'hub {Hub.sha} weights config.json model.safetensors'
    assert hub() == want # only what a model needs
    assert hub(up=False) == want, 'what was fetched must be found again without a network'

def test_hub_lies(hub):
    "A file that fails its hash is refused, today and tomorrow."
    hub.server.lie = True
    for up in True, True, False: assert hub(up).startswith('error:') and 'weights' not in hub(up).split(), up
    assert 'sha256' in hub()
    hub.server.lie = False
    assert hub().startswith('hub ')

def test_hub_without_weights(hub):
    del hub.server.files['model.safetensors']
    assert 'no safetensors weights' in hub()

def test_hub_first_then_registry(registry, tmp_path, monkeypatch):
    snap = tmp_path/Hub.sha; snap.mkdir(); (snap/'model.safetensors').write_bytes(b'x')
    monkeypatch.undo(); monkeypatch.setenv('SDSEL_CACHE', str(registry.cache)) # the real _try_hub
    for k,v in dict(data_dir=lambda: registry.data, convert_gguf=convert).items(): monkeypatch.setattr(assets, k, v)
    monkeypatch.setattr(assets.subprocess, 'run', registry.pip)
    monkeypatch.setattr('huggingface_hub.constants.HF_HUB_OFFLINE', False)
    asked = []
    def snapshot(hub_id, offline): asked.append((hub_id, offline)); return here(offline)
    monkeypatch.setattr(assets, '_hub_snapshot', snapshot)
    def here(offline):
        if offline: raise FileNotFoundError('not cached')
        return snap
    r = assets.resolve('fake')
    assert (r.source, r.path, r.revision) == ('hub', snap, Hub.sha) and asked == [('org/fake', True), ('org/fake', False)] and not registry.calls
    def here(offline): raise ValueError('model.safetensors has sha256 00..., the manifest says 11...')
    fails(lambda: assets.resolve('fake'), ValueError, 'sha256')
    def here(offline): raise ConnectionError('no route to host\nand more')
    fails(lambda: assets.resolve('fake', 'hub'), ValueError, 'ConnectionError: no route to host')
    registry.check(assets.resolve('fake'))
    def here(offline): raise AssertionError('what is here needs no hub')
    asked.clear(); registry.check(assets.resolve('fake')); assert not asked
    shutil.rmtree(registry.folder); asked.clear()
    registry.check(assets.resolve('fake', 'registry')); assert not asked
    monkeypatch.setattr('huggingface_hub.constants.HF_HUB_OFFLINE', True)
    def here(offline): raise ConnectionError('x')
    fails(lambda: assets.resolve('fake', 'hub'), ValueError, 'HF_HUB_OFFLINE')

# ---- an installed package

def test_installed_without_repository(tmp_path, monkeypatch):
    monkeypatch.setattr(sdsel, '__file__', str(tmp_path/'sdsel'/'__init__.py'))
    fails(repository, FileNotFoundError, 'clone of the repository')
    fails(lambda: run_experiment('analyze', 'tiny', out=tmp_path), FileNotFoundError, 'clone of the repository')
    for name in 'papermill','nbdev.clean': monkeypatch.setitem(sys.modules, name, None) # tools of developers
    fails(lambda: run_experiment('analyze', 'tiny', out=tmp_path), FileNotFoundError, 'clone of the repository')

def test_experiment_arguments(tmp_path):
    fails(lambda: run_experiment('nope', 'tiny', out=tmp_path), ValueError, "notebook='nope'", 'analyze')
    fails(lambda: run_experiment('analyze', 'tiny', dict(zz=1), out=tmp_path), ValueError, "parameter 'zz'", 'tokens')
    assert not list(tmp_path.iterdir())

def test_local_data_set(tmp_path):
    "A folder in the Hugging Face format is a prompt source; its rows are checked like all others."
    from sdsel.prompts import load_prompts
    (tmp_path/'set').mkdir(); (tmp_path/'set'/'train.jsonl').write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
    assert [p.messages[0]['content'] for p in load_prompts(tmp_path/'set')] == ['one', 'two']
    with pytest.raises(ValueError, match='test'): load_prompts(tmp_path/'set', split='test')
