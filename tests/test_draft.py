"EAGLE-3: equal to the published code, to real decoding, and to itself after a kill; greedy text of the target, sampled law of the target; what users of other stacks ran into."
import csv, json, os, signal, subprocess, sys, time
from pathlib import Path
import numpy as np
import pytest, torch
from safetensors.torch import load_file
from test_decoding import agree, broken, exact, frequencies, last, pvalue, target6, theirs
from sdsel import generate, load_prompts, load_target
from sdsel.decoding.acceptance import Sampling
from sdsel.decoding.cache import Reader
from sdsel.decoding.eagle3 import Eagle3
from sdsel.decoding.length import Adaptive, Costs
from sdsel.decoding.loop import decode
from sdsel.draft.answers import Answer, Answers, answer_prompts, count_tokens, draft_vocabulary, my_shards
from sdsel.draft.checkpoints import export_draft, load_draft, save_draft
from sdsel.draft.eagle3 import Eagle3Draft, make_draft
from sdsel.draft.features import Features, Online, store_features
from sdsel.draft.losses import step_loss
from sdsel.draft.training import TrainConfig, simulated_hits, train
from sdsel.targets import FAMILIES, tiny_target

# the network

def test_reference_of_three_layers():
    "Logits and losses of five steps that the published implementations gave for one checkpoint."
    here = Path(__file__).parent/'data'/'ttt_k3'
    draft,case = Eagle3Draft.from_pretrained(here),load_file(here/'case.safetensors')
    S = case['input_ids'].shape[1]
    with torch.no_grad(): logits = draft.ttt(case['input_ids'], case['aux'], steps=5)
    for i,z in enumerate(logits):
        assert (z-case[f'logits.{i}'])[:,:S-1-i].abs().max() < 1e-4
        for mode,name in ('eagle', 'loss_eagle'), ('kl', 'loss_aligned_kl'):
            for x in z,case[f'logits.{i}']: assert abs(step_loss(x, case['target_logits'], case['loss_mask'], i, draft.vocabulary, mode)-case[f'{name}.{i}']) < 1e-5, (name, i)

def shaken(draft, seed=1):
    "Weights that make every part of the network matter."
    torch.manual_seed(seed)
    with torch.no_grad():
        for p in draft.parameters(): p.add_(torch.randn(p.shape)*.1)
    return draft.requires_grad_(False)

def states(target, ids, layers): return torch.cat([target.capture(ids, layers).states[h] for h in layers], -1)

@pytest.mark.parametrize('layers', [[3], [2, 5], [1, 3, 5, 7], [0, 2, 4, 6, 8]], ids=len)
@pytest.mark.parametrize('flags', [{}, dict(norm_before_residual=True, norm_before_fc=True), dict(fc_norm=True, norm_output=True)], ids=['plain', 'before', 'output'])
def test_each_step_is_real_decoding(layers, flags):
    "Step i of row t equals reading the text up to t with true states and then i teacher tokens with the draft's own."
    from dataclasses import replace
    from sdsel.draft.eagle3 import config_for
    target = tiny_target(num_layers=8, seed=2)
    draft = shaken(Eagle3Draft(replace(config_for(target, layers, 64), **flags)))
    ids = torch.randint(0, 257, (1, 14), generator=torch.Generator().manual_seed(0))
    aux = states(target, ids, layers)
    z = draft.ttt(ids, aux, 5)
    for t in range(9):
        r = Reader(draft, 32)
        g = draft.fuse(aux[0,:t+1])
        got = r.read(ids[0,1:t+2].tolist(), 1, g)
        for i in range(5):
            assert (got[-1]-z[i][0,t]).abs().max() < 1e-4
            if i < 4: got = r.look([ids[0,t+2+i].item()], states=(r.kept[-1] if r.states is None else r.states)[-1:])

def test_sensitivity():
    "What the reference would catch: each mistake changes logits by far more than the tolerance."
    target = tiny_target(num_layers=8)
    draft = shaken(make_draft(target, [2, 5], torch.arange(64)))
    ids = torch.arange(1, 13)[None]
    aux,z = states(target, ids, [2, 5]),None
    z = draft.ttt(ids, aux, 3)
    half = aux.shape[-1]//2
    assert (draft.ttt(ids, torch.cat([aux[...,half:], aux[...,:half]], -1), 3)[0]-z[0])[:,:9].abs().max() > .01 # order of boundaries
    first = draft.layers[0]
    x = first.self_attn.k_proj.weight.clone(); H = draft.config.hidden_size
    first.self_attn.k_proj.weight.copy_(torch.cat([x[:,H:], x[:,:H]], 1))
    assert (draft.ttt(ids, aux, 3)[0]-z[0])[:,:9].abs().max() > .001 # embedding first

# decoding

costs = Costs(tuple(1+.05*i for i in range(8)), .2)
def shapes(draft):
    return dict(chain=lambda: Eagle3(draft, 4), fixed=lambda: Eagle3(draft, width=(3, 2, 1)), dynamic=lambda: Eagle3(draft, 4, width=3, nodes=9), adaptive=lambda: Eagle3(draft, Adaptive(costs)))

def test_greedy_is_generate():
    "All families, chain and trees, more than 10,000 tokens."
    seen = dict(tokens=0, ties=[])
    for family in FAMILIES:
        target = tiny_target(family, seed=3, **(dict(sliding_window=11) if family in ('mistral', 'mixtral') else {}))
        draft = make_draft(target, [1, 3], torch.arange(0, 257, 2))
        for text in 'abcabcabc, and so on', 'x':
            ids = target.tokenizer(text)['input_ids']
            want = theirs(target, ids, 180)
            for make in shapes(draft).values(): agree(target, ids, want, last(decode(target, ids, make(), max_new_tokens=180)).tokens, seen)
    assert seen['tokens'] >= 10_000

@pytest.mark.parametrize('name,text,least', [('mix', 'List the days of the week.', 1.3), ('gsm_symbolic', 'A baker makes 12 loaves each day and sells 9 of them. How many loaves are left after 4 days?', 2.)])
def test_greedy_is_generate_on_the_real_model(name, text, least):
    "The committed drafts: the target's text, in fewer passes."
    target,seen = load_target('smollm2-135m', device='cpu'),dict(tokens=0, ties=[])
    draft = Eagle3Draft.from_pretrained(Path(__file__).parents[1]/f'data/drafts/smollm2-135m-{name}')
    for kw in {}, dict(width=2), dict(width=(2, 1)):
        g = generate(target, text, method='eagle3', draft=draft, length=3, max_new_tokens=48, **kw)
        agree(target, g.prompt, theirs(target, g.prompt, 48), g.tokens, seen)
        assert g.accepted_length > least
    assert seen['tokens'] > 60

def test_eos_inside_and_exact_lengths():
    target = tiny_target(seed=3)
    draft,ids = learned(target)
    plain = last(decode(target, ids, max_new_tokens=30, eos=())).tokens
    for make in shapes(draft).values():
        for most in 1, 2, 7: assert last(decode(target, ids, make(), max_new_tokens=most, eos=())).tokens == plain[:most]
        for e in set(plain): assert last(decode(target, ids, make(), max_new_tokens=30, eos=(e,))).tokens == plain[:plain.index(e)+1]

@pytest.mark.parametrize('sampling', [Sampling(1.), Sampling(.7, top_k=3), Sampling(1.3, top_p=.8)], ids=str)
@pytest.mark.parametrize('shape', ['chain', 'fixed', 'dynamic'])
def test_joint_law_of_three_tokens(shape, sampling):
    "A bad draft that knows only three of six tokens."
    draft,ids = shaken(make_draft(target6, [1], [0, 2, 5])),[0, 1, 0, 2, 0]
    assert pvalue(frequencies(target6, ids, shapes(draft)[shape], sampling, 3, 700), exact(target6, ids, sampling, 3)) > 1e-4

def test_a_broken_verifier_is_found():
    draft,ids = shaken(make_draft(target6, [1], [0, 2, 5])),[0, 1, 0, 2, 0]
    assert pvalue(frequencies(target6, ids, shapes(draft)['chain'], Sampling(1.), 3, 700, broken), exact(target6, ids, Sampling(1.), 3)) < 1e-6

@pytest.mark.parametrize('family', ['llama', 'gemma3', 'opt'])
def test_cache_after_each_round_is_read_afresh_from_true_states(family):
    "vllm#14649, EAGLE#336: what the draft made up for accepted tokens is replaced."
    target = tiny_target(family, seed=3)
    draft,ids = shaken(make_draft(target, [1, 3], torch.arange(257))),target.tokenizer('abcabc')['input_ids']
    for make in shapes(draft).values():
        d = make()
        for g in decode(target, ids, d, max_new_tokens=24, eos=()):
            n = d.reader.length
            text = [*ids, *g.tokens]
            r = Reader(draft, 64)
            r.read(text[1:n+1], 1, draft.fuse(states(target, torch.tensor([text[:n]]), [1, 3])[0]))
            for a,b in zip(d.reader.cache.layers, r.cache.layers): assert torch.allclose(a.keys[:,:,:n], b.keys[:,:,:n], atol=1e-4) and torch.allclose(a.values[:,:,:n], b.values[:,:,:n], atol=1e-4)

def learned(target, layers=(1, 2, 3), steps=4, tokens=30, seed=0):
    "A draft that knows the target's answer to one prompt by heart, and the prompt."
    import tempfile
    target.head.weight.mul_(30)
    ids = target.tokenizer('what now?')['input_ids']
    text = last(decode(target, ids, max_new_tokens=tokens, eos=())).tokens
    answers = Answers((Answer('a', 'x', ids, text),), dict(target=target.name, revision=target.provenance['revision'], template=None, prompts='x', prompts_hash='x', max_new_tokens=tokens))
    source,vocabulary = Online(target, answers, layers),np.unique(text)
    draft = make_draft(target, layers, vocabulary, seed)
    with tempfile.TemporaryDirectory() as d: train(draft, target, source, d, TrainConfig(steps=steps, epochs=250, batch=1, lr=3e-3, save_every=1000))
    return draft.requires_grad_(False),ids

@pytest.mark.parametrize('layers', [(2,), (1, 3), (1, 2, 3), (0, 1, 2, 3, 4)], ids=len)
def test_a_text_known_by_heart_is_accepted_whole(layers):
    "Every round but the last yields all guesses and the bonus; k = 1 to 5, no NaN (speculators#238)."
    target = tiny_target(seed=3)
    draft,ids = learned(target, layers)
    g = last(decode(target, ids, Eagle3(draft, 4), max_new_tokens=25, eos=()))
    assert [len(r.tokens) for r in g.rounds] == [5]*5

# training

@pytest.fixture(scope='module')
def lessons(tmp_path_factory):
    "A target, its answers, and a source of states."
    target = tiny_target(seed=3); target.head.weight.mul_(30)
    answers = answer_prompts(target, load_prompts(n=12, seed=1), tmp_path_factory.mktemp('a')/'answers', 20)
    return target,answers,draft_vocabulary(count_tokens(answers, 257), 24)

def curve(folder): return [(int(r['step']), float(r['kl'])) for r in csv.DictReader((folder/'train.csv').open())]

def test_an_average_of_few_steps_is_not_the_start(lessons, tmp_path):
    target,answers,vocabulary = lessons
    draft = make_draft(target, [1, 3], vocabulary)
    start,source = {n: p.clone() for n,p in draft.named_parameters()},Online(target, answers, [1, 3])
    train(draft, target, source, tmp_path, TrainConfig(steps=2, epochs=10, batch=4, lr=3e-3, ema=.999))
    kl = curve(tmp_path)
    assert kl[-1][1] < kl[0][1]/2
    moved = draft.fc.weight-start['fc.weight']
    assert moved.norm() > .05*start['fc.weight'].norm()

def test_states_of_another_target_are_refused(lessons, tmp_path):
    target,answers,vocabulary = lessons
    other = tiny_target('qwen3', seed=3)
    with pytest.raises(ValueError, match='its states are of tiny-llama'): train(make_draft(other, [1, 3], vocabulary), other, Online(target, answers, [1, 3]), tmp_path)

def test_a_draft_without_an_embedding_is_not_judged(lessons, tmp_path):
    target,answers,vocabulary = lessons
    bare = load_draft(save_draft(make_draft(target, [1, 3], vocabulary), tmp_path))
    with pytest.raises(ValueError, match='hold no embedding'): simulated_hits(bare, Online(target, answers, [1, 3]), 2)

def test_parts_of_a_batch_change_nothing(lessons, tmp_path):
    target,answers,vocabulary = lessons
    for n in 1, 3:
        train(make_draft(target, [1, 3], vocabulary), target, Online(target, answers, [1, 3]), tmp_path/str(n), TrainConfig(steps=3, epochs=5, batch=6, accumulation=n))
    np.testing.assert_allclose(curve(tmp_path/'1'), curve(tmp_path/'3'), rtol=1e-3)

WORKER = '''
import sys, torch
from pathlib import Path
sys.path.insert(0, {tests!r})
torch.set_num_threads(1)
from sdsel.targets import tiny_target
from sdsel.draft.answers import answer_prompts, count_tokens, draft_vocabulary
from sdsel.draft.eagle3 import make_draft
from sdsel.draft.features import store_features
from sdsel.prompts import load_prompts
from sdsel.draft.training import TrainConfig, simulated_hits, train
target = tiny_target(seed=3); target.head.weight.mul_(30)
answers = answer_prompts(target, load_prompts(n=12, seed=1), sys.argv[1]+'-answers', 20, batch=4)
source = store_features(target, answers, sys.argv[1]+'-states', [1, 3], 'float32', shard_tokens=300)
draft = make_draft(target, [1, 3], draft_vocabulary(count_tokens(answers, 257), 24))
train(draft, target, source, sys.argv[1], TrainConfig(steps=3, epochs=int(sys.argv[2]), batch=int(sys.argv[3]), accumulation=int(sys.argv[4]), save_every=3))
'''

@pytest.fixture(scope='module')
def worker(tmp_path_factory):
    "A training run as a script of its own."
    d = tmp_path_factory.mktemp('w')
    (d/'run.py').write_text(WORKER.format(tests=str(Path(__file__).parent)))
    return d

def weights(folder): return load_file(folder/'checkpoint.safetensors')

def test_killed_and_resumed_is_uninterrupted(worker):
    "kill -9 at odd moments, then to the end: bit-identical weights and the same log."
    env = os.environ | dict(OMP_NUM_THREADS='1')
    run = lambda out: [sys.executable, str(worker/'run.py'), str(worker/out), '20', '6', '1']
    subprocess.run(run('whole'), check=True, env=env)
    for after in 2, 31:
        p = subprocess.Popen(run('killed'), env=env)
        while p.poll() is None and (not (worker/'killed'/'train.csv').exists() or len((worker/'killed'/'train.csv').read_text().splitlines()) < after+1): time.sleep(.005)
        p.send_signal(signal.SIGKILL); p.wait()
    subprocess.run(run('killed'), check=True, env=env)
    assert curve(worker/'killed') == curve(worker/'whole') and len(curve(worker/'whole')) == 40
    a,b = weights(worker/'whole'),weights(worker/'killed')
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)

def test_two_processes_follow_the_same_curve(worker):
    "They share the shards of answers and states, and each batch; of the last one of an epoch, a single sequence, one has nothing, and of others fewer parts."
    env = os.environ | dict(OMP_NUM_THREADS='1')
    subprocess.run([sys.executable, str(worker/'run.py'), str(worker/'one'), '6', '11', '3'], check=True, env=env)
    subprocess.run([sys.executable, '-m', 'accelerate.commands.launch', '--cpu', '--num_processes', '2', '--num_machines', '1', '--mixed_precision', 'no', '--dynamo_backend', 'no', '--main_process_port', '0', str(worker/'run.py'), str(worker/'two'), '6', '11', '3'], check=True, env=env)
    np.testing.assert_allclose(curve(worker/'one'), curve(worker/'two'), rtol=1e-3)
    answers = lambda name: [p.read_bytes() for p in sorted((worker/f'{name}-answers').glob('*.jsonl.gz'))]
    assert len(answers('two')) == 3 and answers('one') == answers('two') and len(list((worker/'two-states').glob('*.safetensors'))) > 1

def test_shards_of_two_processes(tmp_path, monkeypatch):
    "Whatever the other has done already, each missing shard is made by one of them."
    paths = [tmp_path/str(i) for i in range(7)]
    paths[2].touch()
    monkeypatch.setenv('WORLD_SIZE', '2'); monkeypatch.setenv('RANK', '0'); first = my_shards(paths)
    paths[4].touch()
    monkeypatch.setenv('RANK', '1'); second = my_shards(paths)
    assert sorted(first+second) == [0, 1, 3, 4, 5, 6]

def test_precision_can_change_within_a_process(lessons, tmp_path):
    target,answers,vocabulary = lessons
    for precision in 'bf16', 'fp32': train(make_draft(target, [1, 3], vocabulary), target, Online(target, answers, [1, 3]), tmp_path/precision, TrainConfig(steps=2, epochs=2, batch=6, precision=precision))
    np.testing.assert_allclose(curve(tmp_path/'bf16'), curve(tmp_path/'fp32'), rtol=.05)
    assert curve(tmp_path/'bf16') != curve(tmp_path/'fp32')

def test_a_trained_draft_can_be_trained_further(lessons, tmp_path):
    "Also one that was loaded in bfloat16 and frozen."
    target,answers,vocabulary = lessons
    source,config = Online(target, answers, [1, 3]),TrainConfig(steps=2, epochs=4, batch=6)
    draft = make_draft(target, [1, 3], vocabulary)
    train(draft, target, source, tmp_path/'a', config); save_draft(draft.requires_grad_(False), tmp_path/'d', dtype='bfloat16')
    again = load_draft(tmp_path/'d', target)
    train(again.requires_grad_(False), target, source, tmp_path/'b', config)
    assert again.dtype == torch.float32 and not again.embed_tokens.weight.requires_grad and curve(tmp_path/'b')[-1][1] < curve(tmp_path/'a')[-1][1]

def test_a_run_with_other_data_is_refused(lessons, tmp_path):
    "Another vocabulary, other answers, shorter sequences or states of another type: the checkpoint belongs to something else."
    target,answers,vocabulary = lessons
    config = TrainConfig(steps=2, epochs=2, batch=6)
    go = lambda vocabulary=vocabulary, answers=answers, **kw: train(make_draft(target, [1, 3], vocabulary), target, Online(target, answers, [1, 3], **kw), tmp_path, config, 2)
    go()
    with pytest.raises(ValueError, match='norm_output='): train(make_draft(target, [1, 3], vocabulary, norm_output=True), target, Online(target, answers, [1, 3]), tmp_path, config)
    with pytest.raises(ValueError, match='vocabulary='): go(sorted({*vocabulary[1:], 0 if vocabulary[0] else 1}))
    for kw in dict(answers=answers[::-1]), dict(max_length=max(len(a.prompt)+len(a.tokens) for a in answers)-1), dict(dtype=torch.bfloat16):
        with pytest.raises(ValueError, match='data='): go(**kw)

def test_a_torn_line_of_the_log_is_dropped(lessons, tmp_path):
    target,answers,vocabulary = lessons
    config = TrainConfig(steps=2, epochs=3, batch=6)
    go = lambda n: train(make_draft(target, [1, 3], vocabulary), target, Online(target, answers, [1, 3]), tmp_path, config, n)
    go(3); whole = (tmp_path/'train.csv').read_text()
    for torn in '1', ',', '\0\0', '4,1':
        (tmp_path/'train.csv').write_text(whole+torn); go(0)
        assert (tmp_path/'train.csv').read_text().split() == whole.split()
    go(None); assert [s for s,_ in curve(tmp_path)] == [1, 2, 3, 4, 5, 6]

def test_a_finished_turn_is_not_answered_again(tmp_path):
    "The reference answer of a data set is left out, whoever asks."
    from sdsel.decoding.generate import prompt_ids
    from sdsel.prompts import PromptSet, as_prompt
    target = tiny_target()
    with_answer,without = (as_prompt(dict(prompt='Say hi', **r), 'a') for r in (dict(response='Hello there.'), {}))
    assert prompt_ids(target, with_answer) == prompt_ids(target, without) == answer_prompts(target, PromptSet('x', (with_answer,)), tmp_path, 4).rows[0].prompt

def test_long_prompts_are_left_out_not_cut(tmp_path):
    from sdsel.prompts import PromptSet, as_prompt
    two = PromptSet('x', tuple(as_prompt(dict(prompt=t), t[:3]) for t in ('why '*30, 'hi')))
    with pytest.warns(UserWarning, match='1 of 2 prompts are left out'): got = answer_prompts(tiny_target(), two, tmp_path, 4, max_length=50)
    assert [a.id for a in got] == ['hi']

def test_nan_names_the_sequence_and_keeps_the_checkpoint(lessons, tmp_path):
    target,answers,vocabulary = lessons
    source = Online(target, answers, [1, 3])
    config = TrainConfig(steps=3, epochs=4, batch=6, save_every=1)
    train(make_draft(target, [1, 3], vocabulary), target, source, tmp_path, config, 3)
    before,batch = (tmp_path/'checkpoint.safetensors').read_bytes(),source.batch
    def bad(i):
        b = batch(i)
        if 5 in i: b.aux[list(i).index(5),2] = float('nan')
        return b
    source.batch = bad
    with pytest.raises(FloatingPointError, match='sequence 5 .* row 2'): train(make_draft(target, [1, 3], vocabulary), target, source, tmp_path, config)
    assert (tmp_path/'checkpoint.safetensors').read_bytes() == before

def test_a_damaged_checkpoint_is_named(lessons, tmp_path):
    target,answers,vocabulary = lessons
    source,config = Online(target, answers, [1, 3]),TrainConfig(steps=3, epochs=2, batch=6)
    train(make_draft(target, [1, 3], vocabulary), target, source, tmp_path, config)
    p = tmp_path/'checkpoint.safetensors'
    p.write_bytes(p.read_bytes()[:500])
    with pytest.raises(ValueError, match='checkpoint.safetensors is damaged'): train(make_draft(target, [1, 3], vocabulary), target, source, tmp_path, config)

def test_tensorboard_shows_what_the_csv_says(lessons, tmp_path):
    "Stopped and resumed, each step once."
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    target,answers,vocabulary = lessons
    for n in 3, None: train(make_draft(target, [1, 3], vocabulary), target, Online(target, answers, [1, 3]), tmp_path, TrainConfig(steps=2, epochs=4, batch=6, save_every=3), n)
    board = EventAccumulator(str(tmp_path/'tensorboard')); board.Reload()
    shown = [(e.step, e.value) for e in board.Scalars('kl')]
    assert {'hit_0', 'kl_1', 'lr', 'tokens_per_second'} <= set(board.Tags()['scalars'])
    np.testing.assert_allclose(shown, curve(tmp_path), rtol=1e-4)

def test_training_leaves_the_target_alone(lessons, tmp_path):
    "SpecForge#563: modes and weights are as before."
    target,answers,vocabulary = lessons
    before = {n: p.clone() for n,p in target.model.named_parameters()}
    train(make_draft(target, [1, 3], vocabulary), target, Online(target, answers, [1, 3]), tmp_path, TrainConfig(steps=2, epochs=1, batch=6))
    assert not target.model.training and all(torch.equal(p, before[n]) and not p.requires_grad for n,p in target.model.named_parameters())

# stores and files

def test_disk_too_small(lessons, tmp_path, monkeypatch):
    import shutil
    target,answers,_ = lessons
    monkeypatch.setattr(shutil, 'disk_usage', lambda p: shutil._ntuple_diskusage(10, 10, 10))
    with pytest.raises(OSError, match='features'): store_features(target, answers, tmp_path/'f')

def test_truncated_features_are_named(lessons, tmp_path):
    target,answers,_ = lessons
    store_features(target, answers, tmp_path/'f', [1])
    p = next((tmp_path/'f').glob('*.safetensors')); p.write_bytes(p.read_bytes()[:999])
    with pytest.raises(ValueError, match='features-00000'): Features(tmp_path/'f')

def test_another_template_is_refused(lessons, tmp_path):
    "Model-Optimizer#300: the template of the answers is the template of training."
    target,answers,_ = lessons
    other = tiny_target(seed=3); other.tokenizer.chat_template = "{{ messages[0]['content'] }}"
    with pytest.raises(ValueError, match='another chat template'): Online(other, answers, [1])

def test_answers_without_words():
    "marin#7237: nothing to learn from is an error, not a loss of zero."
    target = tiny_target()
    about = dict(target='t', revision=target.provenance['revision'], template=None, prompts='x', prompts_hash='x', max_new_tokens=1)
    with pytest.raises(ValueError, match='loss mask would be all zero'): Online(target, Answers((Answer('a', 'x', [1, 2], []),), about), [1])
    with pytest.raises(ValueError, match='loss mask would be all zero'): count_tokens(Answers((Answer('a', 'x', [1, 2], []),), about), 257)

@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
@pytest.mark.parametrize('fmt', ['speculators', 'eagle'])
def test_export_round_trip(tmp_path, fmt, dtype):
    target = tiny_target(num_layers=8)
    draft = make_draft(target, [1, 4, 6, 7], torch.arange(3, 99))
    export_draft(draft, tmp_path/'x', fmt, dtype=dtype)
    c,again = json.loads((tmp_path/'x'/'config.json').read_text()),load_draft(tmp_path/'x', target)
    assert c['eagle_aux_hidden_state_layer_ids'] == [1, 4, 6, 7] and (fmt == 'speculators' or c['eagle_config']['eagle_aux_hidden_state_layer_ids'] == [0, 3, 5, 6])
    assert (c if fmt == 'eagle' else c['transformer_layer_config'])['num_aux_hidden_states'] == 4
    for n,x in draft.state_dict().items(): assert torch.equal(again.state_dict()[n], x.to(dtype) if x.is_floating_point() else x), n

def test_full_vocabulary_needs_no_table(tmp_path):
    target = tiny_target(num_layers=8)
    save_draft(make_draft(target, [1, 4], torch.arange(257)), tmp_path)
    assert not {'d2t', 't2d'} & set(load_file(tmp_path/'model.safetensors')) and load_draft(tmp_path, target).vocab_size == 257

def test_a_torn_pair_of_files_is_named(tmp_path):
    "Killed between the two files of a save."
    target = tiny_target()
    for name,layers in ('a', [2, 3]), ('b', [1, 4]): save_draft(make_draft(target, layers, range(9)), tmp_path/name)
    (tmp_path/'b'/'model.safetensors').replace(tmp_path/'a'/'model.safetensors')
    with pytest.raises(ValueError, match='saved for layers 1 4, norms plain, config.json says layers 2 3'): load_draft(tmp_path/'a')

def test_rope_of_older_files(tmp_path):
    "rope_theta at the top, or a scaling with its older name, is kept."
    save_draft(make_draft(tiny_target(), [2, 3], range(9)), tmp_path, 'eagle')
    config = json.loads((tmp_path/'config.json').read_text())
    for change,want in (dict(rope_parameters={'rope_type': 'default'}, rope_theta=5e5), dict(rope_type='default', rope_theta=5e5)), (dict(rope_parameters=None, rope_scaling={'type': 'linear', 'factor': 4.}, rope_theta=7.), dict(rope_type='linear', factor=4., rope_theta=7.)):
        (tmp_path/'config.json').write_text(json.dumps(config|change))
        assert load_draft(tmp_path).eagle.llama['rope_parameters'] == want
    for change in dict(eagle_config=None, eagle_aux_hidden_state_layer_ids=None), dict(draft_vocab_size='30'), dict(hidden_size=[]):
        (tmp_path/'config.json').write_text(json.dumps(config|change))
        with pytest.raises(ValueError, match='config.json'): load_draft(tmp_path)

def test_what_cannot_be_written_is_refused_before(tmp_path):
    draft = make_draft(tiny_target(), [2, 3], range(9))
    for kw,word in (dict(dtype='int8'), 'no fractions'), (dict(dtype='x'), "dtype='x'"), (dict(length=-3), 'length=-3'), (dict(length=2.5), 'length=2.5'):
        with pytest.raises(ValueError, match=word): export_draft(draft, tmp_path/'d', **kw)
    save_draft(draft, tmp_path/'s'); lone = load_draft(tmp_path/'s')
    with pytest.raises(ValueError, match='embedding'): save_draft(lone, tmp_path/'d', embedding=True)
    assert not (tmp_path/'d').exists()
    export_draft(lone, tmp_path/'d', target=tiny_target())
    assert torch.equal(load_draft(tmp_path/'d').embed_tokens.weight, draft.embed_tokens.weight)

def test_a_copied_model_is_the_same_model(tmp_path):
    "The revision of a folder is that of its contents, not of its dates."
    import shutil
    from sdsel.assets import resolve
    t = tiny_target(); t.model.save_pretrained(tmp_path/'m'); t.tokenizer.save_pretrained(tmp_path/'m')
    shutil.copytree(tmp_path/'m', tmp_path/'copy', copy_function=shutil.copyfile)
    one = resolve(str(tmp_path/'m')).revision
    assert resolve(str(tmp_path/'copy')).revision == one
    w = tmp_path/'copy'/'model.safetensors'; b = bytearray(w.read_bytes()); b[-5] ^= 1; w.write_bytes(b)
    assert resolve(str(tmp_path/'copy')).revision != one

def test_pickles_are_refused(tmp_path):
    (tmp_path/'config.json').write_text('{}'); (tmp_path/'pytorch_model.bin').write_bytes(b'x')
    with pytest.raises(FileNotFoundError, match='never pickles'): load_draft(tmp_path)
