"Measures against values that independent packages agree on, and the invariances that define them."
import json, math
from pathlib import Path
import numpy as np
import pytest, torch
from hypothesis import given, settings, strategies as st
from sdsel.analysis.cka import cka_matrix, linear_cka, minibatch_cka, rbf_cka
from sdsel.analysis.entropy import (debiased_entropy2, hsic1, joint_entropy, matrix_entropy, normalise, offdiagonal, order2, participation_ratio,
                                    rankme, squared_norms, von_neumann_rank)

cases = json.loads((Path(__file__).parent/'measures.json').read_text())
settings.register_profile('sdsel', deadline=None, max_examples=25, derandomize=True); settings.load_profile('sdsel')

def arrays(name):
    if name == 'tall': r = np.random.RandomState(0); X = r.randn(256, 32); return X, X@r.randn(32, 48)/np.sqrt(32)+.5*r.randn(256, 48)+3.
    if name == 'wide': r = np.random.RandomState(1); X = r.randn(48, 256); return X, X@r.randn(256, 192)/16+.5*r.randn(48, 192)
    r = np.random.RandomState(4); X,Y = r.randn(128, 64),r.randn(128, 64)
    X[0,7] += 1000.; Y[0,7] += 1000.; X[:,3] += 20.; Y[:,3] += 20.
    return X,Y

close = lambda a,b: math.isclose(a, b, rel_tol=1e-8)
kinds = dict(raw_trace=(False, False), centered_trace=(False, True), cosine=(True, False))
orders = {'H1': 1., 'H2': 2., 'H0.5': .5, 'H3': 3.}

@pytest.mark.parametrize('wrap', [np.asarray, torch.from_numpy], ids=['numpy', 'torch'])
@pytest.mark.parametrize('case', cases)
def test_values(case, wrap):
    want = cases[case]
    arr = dict(zip('XY', map(wrap, arrays(case))))
    X,Y = arr.values()
    assert close(linear_cka(X, Y), want['linear_cka_biased'])
    assert close(linear_cka(X, Y, debiased=True), want['linear_cka_debiased'])
    assert close(rbf_cka(X, Y), want['rbf_cka_biased_sigma_0.5_median'])
    assert close(minibatch_cka(X, Y, len(X)//4), want['minibatch_4'])
    Zs = [torch.as_tensor(A)-torch.as_tensor(A).mean(0) for A in (X, Y)]
    assert close(float(hsic1(offdiagonal(Zs), squared_norms(Zs))[0,1]), want['hsic1_xy'])
    for name,A in arr.items():
        w = want[name]
        for kind,flags in kinds.items():
            for order,alpha in orders.items():
                if order in w[kind]: assert close(matrix_entropy(A, alpha, *flags), w[kind][order]), (kind, order)
        centred = np.asarray(A)-np.asarray(A).mean(0)
        for order in 'H1','H2': assert close(matrix_entropy(centred, orders[order], True, False), w['center_then_cosine'][order])
        assert close(debiased_entropy2(A, row_norm=False), w['debiased_H2'])
        assert close(rankme(A), w['rankme']) and close(von_neumann_rank(A), w['von_neumann_rank'])
        assert close(participation_ratio(A), w['participation_ratio']) and close(von_neumann_rank(centred, True), w['diff_erank'])

@st.composite
def matrices(draw):
    n,d,seed = draw(st.integers(6, 40)),draw(st.integers(2, 30)),draw(st.integers(0, 10**6))
    r = np.random.default_rng(seed)
    return r.normal(size=(n, d))*r.exponential(size=d)+draw(st.sampled_from([0, 3])),r

def rotation(r, d): return np.linalg.qr(r.normal(size=(d, d)))[0]

@given(matrices(), st.sampled_from([.5, 1, 2, 3, math.inf]), st.booleans(), st.booleans())
def test_entropy_invariances(m, alpha, row, centre):
    X,r = m; n,d = X.shape
    f = lambda A: matrix_entropy(A, alpha, row, centre)
    h,tol = f(X),dict(rel=1e-6, abs=1e-7)
    assert f(7.5*X@rotation(r, d)) == pytest.approx(h, **tol)        # rotation, scale
    assert f(X[r.permutation(n)]) == pytest.approx(h, **tol)         # order of tokens
    assert f(np.concatenate([X, X])) == pytest.approx(h, **tol)      # every token twice
    assert -1e-9 <= h <= math.log(min(n, d))+1e-9
    if row: assert f(X*r.uniform(.1, 9, size=(n, 1))) == pytest.approx(h, **tol)
    if centre and not row: assert f(X+r.normal(size=d)) == pytest.approx(h, **tol)

@given(matrices())
def test_not_invariant(m):
    "The 'no' entries of the table: a test that could not fail would say nothing."
    X,r = m; n,d = X.shape
    gain = np.linspace(1, 30, d)
    assert abs(matrix_entropy(X*gain, row_norm=False)-matrix_entropy(X, row_norm=False)) > 1e-9
    Y = r.normal(size=(n, 5))
    rows = r.uniform(.1, 9, size=(n, 1))
    assert abs(linear_cka(X*rows, Y)-linear_cka(X, Y)) > 1e-12
    assert abs(debiased_entropy2(np.concatenate([X, X]))-debiased_entropy2(X)) > 1e-12 # duplicates break independence

@given(matrices(), st.booleans())
def test_cka_invariances(m, debiased):
    X,r = m; n,d = X.shape
    Y = r.normal(size=(n, 7))+X[:,:1]
    c = linear_cka(X, Y, debiased)
    assert linear_cka(3*X@rotation(r, d)+r.normal(size=d), Y, debiased) == pytest.approx(c, abs=1e-7)
    p = r.permutation(n)
    assert linear_cka(X[p], Y[p], debiased) == pytest.approx(c, abs=1e-8)
    assert linear_cka(Y, X, debiased) == pytest.approx(c, abs=1e-10)
    if not debiased:
        assert linear_cka(np.concatenate([X, X]), np.concatenate([Y, Y])) == pytest.approx(c, abs=1e-8)
        assert -1e-12 <= c <= 1+1e-12

@given(st.integers(2, 5), st.integers(0, 99))
def test_joint_entropy_bounds(k, seed):
    r = np.random.default_rng(seed)
    Xs = [r.normal(size=(50, r.integers(3, 60))) for _ in range(k)]
    each,joint = [matrix_entropy(X) for X in Xs],joint_entropy(Xs)
    assert np.mean(each)-1e-9 <= joint <= np.mean(each)+math.log(k)+1e-9
    assert joint_entropy([Xs[0]]*k) == pytest.approx(each[0], abs=1e-9)

@pytest.mark.parametrize('n,d', [(700, 40), (300, 200)])
def test_fast_paths_equal_brute_force(n, d):
    r = np.random.default_rng(0)
    Xs = [r.normal(size=(n, d)) for _ in range(4)]
    Zs = [normalise(X) for X in Xs]
    Ks = [(Z@Z.T).numpy() for Z in Zs]
    brute = np.array([[(A*B).sum() for B in Ks] for A in Ks])
    np.testing.assert_allclose(order2(Zs, False).numpy(), brute, rtol=1e-10)
    np.testing.assert_allclose(order2([Z.float() for Z in Zs], False).numpy(), brute, rtol=1e-4)
    np.testing.assert_allclose(cka_matrix(Xs, True), [[linear_cka(A, B, True) for B in Xs] for A in Xs], rtol=1e-9)
    for alpha in 1,2,3:
        lam = np.linalg.eigvalsh((Ks[0]+Ks[1]+Ks[2])/3); lam = lam[lam > 1e-12]
        want = -(lam*np.log(lam)).sum() if alpha == 1 else np.log((lam**alpha).sum())/(1-alpha)
        assert joint_entropy(Xs[:3], alpha) == pytest.approx(want, rel=1e-8)

def test_precision():
    r = np.random.default_rng(0)
    X = r.normal(size=(500, 64))
    assert matrix_entropy(X) != matrix_entropy(X.astype('float32')) # float64 is kept
    assert matrix_entropy(X.astype('float32')) == pytest.approx(matrix_entropy(X), rel=1e-5)
    assert matrix_entropy(torch.from_numpy(X).bfloat16()) == pytest.approx(matrix_entropy(X), rel=1e-3)

def test_float32_keeps_the_tail():
    "A cut-off relative to the top eigenvalue would lose the many small directions of 4,096 float32 tokens."
    r = np.random.default_rng(0)
    X = (r.normal(size=(4096, 128))*np.r_[100, np.full(127, .5)]).astype('float32')
    for f in matrix_entropy, lambda A: joint_entropy([A, A[:,::-1].copy()*2]): assert f(X) == pytest.approx(f(X.astype('float64')), abs=1e-5)

@pytest.mark.parametrize('f,message', [
    (lambda: matrix_entropy(np.zeros((3, 2))), 'constant'), (lambda: matrix_entropy(np.ones((1, 4))), 'n >= 2'),
    (lambda: matrix_entropy(np.full((3, 2), np.inf)), 'infinite values in 3 of 3 rows'), (lambda: matrix_entropy(np.eye(3), alpha=-1), 'alpha'),
    (lambda: debiased_entropy2(np.random.rand(3, 2)), 'at least 4 tokens'), (lambda: joint_entropy([]), 'empty'),
    (lambda: linear_cka(np.random.rand(5, 2), np.random.rand(6, 2)), 'same tokens'), (lambda: matrix_entropy(np.zeros(4)), 'shape'),
    (lambda: minibatch_cka(np.random.rand(8, 2), np.random.rand(8, 2), 3), 'batch_size=3')])
def test_bad_input(f, message):
    with pytest.raises(ValueError, match=message): f()
