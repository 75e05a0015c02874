"Models of many families read the way transformers reads them, and masks that hold the model's own words."
import pytest, torch
from sdsel import assets
from sdsel.analysis.states import collect_states
from sdsel.analysis.statistics import layer_statistics
from sdsel.prompts import as_prompt, encode, render
from sdsel.targets import FAMILIES, Captured, Target, byte_tokenizer, find_blocks, fingerprint, load_target, tiny_target

moe = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
others = dict(gpt2={}, gemma2=dict(head_dim=8, sliding_window=8, final_logit_softcapping=.5), granite=dict(logits_scaling=8., embedding_multiplier=12., residual_multiplier=.22, attention_multiplier=.1),
              cohere=dict(logit_scale=.0625), cohere2=dict(logit_scale=.0625, sliding_window=8), phi3={}, olmo2={}, qwen2_moe=dict(moe, shared_expert_intermediate_size=16), qwen3_moe=dict(moe, head_dim=8),
              falcon=dict(num_kv_heads=2), bloom={}, phi={}, stablelm={}, starcoder2={}, smollm3={}, glm4=dict(head_dim=8), gptj=dict(rotary_dim=4))

def other(kind):
    from transformers import AutoConfig, AutoModelForCausalLM
    tok = byte_tokenizer()
    cfg = AutoConfig.for_model(kind, **dict(vocab_size=len(tok), hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
                                            bos_token_id=0, eos_token_id=256, pad_token_id=256, **others[kind]))
    torch.manual_seed(0)
    return Target(AutoModelForCausalLM.from_config(cfg, dtype=torch.float32), tok, kind)

def build(kind):
    "A random model whose norms have gains of their own: with gains of one, norming twice would not show."
    t = tiny_target(kind) if kind in FAMILIES else other(kind)
    g = torch.Generator().manual_seed(1)
    for p in t.model.parameters():
        if p.ndim == 1: p.add_(.3*torch.randn(p.shape, generator=g))
    return t

every = pytest.mark.parametrize('kind', [*FAMILIES, *others])
def ids(*shape, seed=0): return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed))

@every
def test_states_are_those_of_transformers(kind):
    t,x = build(kind),ids(2, 9)
    L,got = t.num_layers,t.capture(x, range(t.num_layers+1))
    fingerprint(t, x); fingerprint(t)
    want = t.model(input_ids=x, output_hidden_states=True, use_cache=False)
    for h in range(L): assert torch.equal(got.states[h], want.hidden_states[h]), h
    assert got.final.shape == (2, 9, t.head.weight.shape[1])
    assert not torch.allclose(got.states[L], got.final, atol=1e-3), 'h = L is before the final norm'
    torch.testing.assert_close(t.final_norm(got.states[L]), got.final)
    torch.testing.assert_close(t.logits(got.final), want.logits, rtol=1e-4, atol=1e-4)

@every
def test_capture(kind):
    t,x = build(kind),ids(3, 7)
    L = t.num_layers
    full = t.capture(x, range(L+1))
    rows,cols = torch.tensor([0, 2, 2]),torch.tensor([6, 0, 3])
    some = t.capture(x, [L, 1, 2], lambda x, h: x[rows,cols]) # any order, only these rows
    assert list(some.states) == [1, 2, L]
    for h,s in some.states.items(): assert torch.equal(s, full.states[h][rows,cols])
    assert torch.equal(some.final, full.final)
    assert not any(len(m._forward_hooks)+len(m._forward_pre_hooks) for m in t.model.modules()), 'hooks are taken away again'

@every
def test_right_padding_changes_nothing(kind):
    t,x = build(kind),ids(2, 9)
    a,b = t.capture(x, range(t.num_layers+1)),t.capture(torch.cat([x, ids(2, 5, seed=1)], 1), range(t.num_layers+1))
    for h in a.states: torch.testing.assert_close(b.states[h][:,:9], a.states[h], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(b.final[:,:9], a.final, rtol=1e-4, atol=1e-5)

def test_head_of_another_width():
    "OPT-350m: no final norm, and a projection between the last block and the head."
    t = tiny_target('opt', do_layer_norm_before=False, word_embed_proj_dim=16)
    fingerprint(t)
    s = collect_states(t, [as_prompt(dict(prompt='some words '*9), 'w')], 50)
    assert s.x.shape == (5, 50, 32) and s.future.shape == (50, 16) and len(layer_statistics(s).future_cka) == 5

class Shifted(Target):
    "Reads the output of block h where its input is meant."
    def capture(self, input_ids, layers, pick=None):
        L = self.num_layers
        c = super().capture(input_ids, range(L+1), pick)
        return Captured({h: c.states[min(h+self.by, L)] for h in layers}, c.final)
class Normed(Target):
    "Reads h = L after the final norm, as hidden_states[-1] does."
    def capture(self, input_ids, layers, pick=None):
        c = super().capture(input_ids, layers, pick)
        return Captured({h: c.final if h == self.num_layers else s for h,s in c.states.items()}, c.final)

@pytest.mark.parametrize('kind', ['llama', 'gemma3', 'gpt_neox', 'gpt2'])
def test_fingerprint_catches_mistakes(kind):
    t = build(kind)
    off = Shifted(t.model, t.tokenizer, 'off'); off.by = 1
    with pytest.raises(ValueError, match=r'off: the state captured at h=0 is not hidden_states\[0\]'): fingerprint(off)
    with pytest.raises(ValueError, match=rf'normed: the norm found \(.*\) does not turn h={t.num_layers}'): fingerprint(Normed(t.model, t.tokenizer, 'normed'))
    t.final_norm = torch.nn.Identity()
    with pytest.raises(ValueError, match='the norm found'): fingerprint(t)

@pytest.mark.parametrize('kind,field', [('gemma2', 'final_logit_softcapping'), ('granite', 'logits_scaling'), ('cohere', 'logit_scale')])
def test_fingerprint_catches_unknown_scaling(kind, field):
    class Plain(Target): logits = lambda self, final: self.head(final)
    t = build(kind)
    with pytest.raises(ValueError, match='rescales'): fingerprint(Plain(t.model, None, 'plain'), ids(2, 9))

def test_no_decoder():
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
    cfg = dict(vocab_size=99, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4)
    with pytest.raises(ValueError, match='no output head'): Target(AutoModel.from_config(AutoConfig.for_model('llama', **cfg)), None, 'x')
    with pytest.raises(ValueError): fingerprint(Target(AutoModelForCausalLM.from_config(AutoConfig.for_model('bert', **cfg)), None, 'x')) # looks both ways
    class Empty(torch.nn.Module): config = AutoConfig.for_model('llama', **cfg)
    with pytest.raises(ValueError, match='Empty has no list of 3 decoder blocks'): find_blocks(Empty())

# ---- response masks

styles = dict(
    chatml=("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}", '{}<|im_end|>'),
    llama3=("<|begin_of_text|>{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content|trim }}<|eot_id|>{% endfor %}"
            "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}", '{}<|eot_id|>'),
    mistral=("<s>{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %} {{ m.content }}</s>{% endif %}{% endfor %}", ' {}</s>'),
    gemma=("<bos>{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content|trim }}<end_of_turn>\n{% endfor %}"
           "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}", '{}<end_of_turn>'),
    zephyr=("{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}</s>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}", '{}</s>'))
turns = [dict(role=r, content=c) for r,c in (('user', 'How many?'), ('assistant', 'Forty-two, I\nthink: "é" 日'), ('user', 'Sure?'), ('assistant', 'Yes.'))]

def spoken(tok, e): return [tok.decode([i for i,r in zip(e.ids[a:b], e.response[a:b])]) for a,b in runs(e.response)]
def runs(mask):
    "Start and end of each run of True."
    edges = [i for i in range(len(mask)+1) if (i < len(mask) and mask[i]) != (i > 0 and mask[i-1])]
    return list(zip(edges[::2], edges[1::2]))

@pytest.mark.parametrize('style', styles)
def test_masks(style):
    tok,(template,end) = byte_tokenizer(),styles[style]
    tok.chat_template = template
    def mask(n): return spoken(tok, encode(tok, [as_prompt(dict(messages=turns[:n]), 'w')])[0])
    assert mask(1) == []                                                             # a question alone
    assert mask(2) == [end.format(turns[1]['content'])]                              # one turn
    assert mask(3) == [end.format(turns[1]['content'])]                              # answered, and asked again
    assert mask(4) == [end.format(t['content']) for t in turns if t['role'] == 'assistant'] # two turns
    text,_ = render(tok, turns[:1]); assert text == tok.apply_chat_template(turns[:1], tokenize=False, add_generation_prompt=True)

def test_raw_masks():
    tok = byte_tokenizer()
    e = encode(tok, [as_prompt(dict(messages=turns[:2]), 'w')], raw=True)[0]
    assert spoken(tok, e) == [turns[1]['content']] and tok.decode(e.ids) == turns[0]['content']+turns[1]['content']
    with pytest.warns(UserWarning, match='1 of 1 prompts were cut'):
        cut = encode(tok, [as_prompt(dict(messages=turns[:2]), 'w')], raw=True, max_length=len(turns[0]['content'])+3)[0]
    assert spoken(tok, cut) == [turns[1]['content'][:3]]

def test_template_that_drops_thoughts():
    "Qwen3 and others leave earlier thoughts out: such a conversation is refused, its last turn alone is fine."
    tok = byte_tokenizer()
    tok.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content if loop.last or m.role == 'user' else m.content.split('</think>')[-1] }}<end>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    think = [dict(role='user', content='a'), dict(role='assistant', content='<think>hm</think>b'), dict(role='user', content='c'), dict(role='assistant', content='d')]
    assert spoken(tok, encode(tok, [as_prompt(dict(messages=think[:2]), 'w')])[0]) == ['<think>hm</think>b<end>']
    with pytest.raises(ValueError, match='rewrites earlier turns.*message 1'): render(tok, think)

# ---- the default model, if it is here

@pytest.fixture(scope='module')
def smollm():
    if not assets._complete(assets.cache_dir()/'models'/'smollm2-135m'): pytest.skip('smollm2-135m is not in the cache: sdsel fetch smollm2-135m')
    return load_target('smollm2-135m', device='cpu')

def test_default_model(smollm):
    assert (smollm.num_layers, smollm.hidden_size) == (30, 576) and smollm.provenance['source'] == 'registry'
    x = smollm.tokenizer('The capital of France is', return_tensors='pt').input_ids
    fingerprint(smollm, x)
    assert smollm.tokenizer.decode(smollm.logits(smollm.capture(x, [0]).final[0,-1]).argmax()).strip() == 'Paris'

def test_default_model_masks(smollm):
    e = encode(smollm.tokenizer, [as_prompt(dict(messages=turns), 'w')])[0]
    assert spoken(smollm.tokenizer, e) == [t['content']+'<|im_end|>' for t in turns if t['role'] == 'assistant']
