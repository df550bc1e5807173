"""float64 definitions of every advantage, one row and one group at a time: loops on purpose, written from the papers.

Formulas: GAE arXiv:1506.02438, V-trace arXiv:1802.01561, Retrace arXiv:1606.02647, GRPO arXiv:2402.03300,
Dr. GRPO arXiv:2503.20783, RLOO arXiv:2402.14740, OPO arXiv:2505.23585, MaxRL arXiv:2602.02710, pass@k
arXiv:2503.19595, GPG arXiv:2504.02546; what a peer adds to them is in the function of its name.
"""

from __future__ import annotations

import numpy as np


def gae_row(r, v, m, gamma, lam, boot=0.0, done=None, carry=False):
    """GAE over the valid tokens; `lam` a number or one per token (that of the next state weighs its return)."""
    T = len(r)
    A, R = np.zeros(T), np.zeros(T)
    lam = np.broadcast_to(np.asarray(lam, np.float64), (T,))
    v_next, ret_next, lam_next, after_last, a = float(boot), float(boot), 0.0, True, 0.0
    for t in range(T - 1, -1, -1):
        if m[t]:
            going_on = 1.0 if done is None else 1.0 - float(done[t])
            blended = v_next if after_last else (1 - lam_next) * v_next + lam_next * ret_next
            ret = r[t] + gamma * going_on * blended
            v_next, ret_next, lam_next, after_last = v[t], ret, lam[t], False
            A[t], R[t], a = ret - v[t], ret, ret - v[t]
        elif carry:
            A[t], R[t] = a, a + v[t]
    return A, R


def returns_row(r, m, gamma, boot=0.0, done=None, masked="skip"):
    T = len(r)
    G, acc = np.zeros(T), float(boot)
    seen = False
    for t in range(T - 1, -1, -1):
        if m[t]:
            acc = r[t] + gamma * (0.0 if done is not None and done[t] else acc)
            G[t], seen = acc, True
        elif seen:
            acc *= {"skip": 1.0, "step": gamma, "reset": 0.0}[masked]
    return G


def gae_masked_steps_row(r, v, m, gamma, lam):
    """OpenRLHF: r and v are multiplied by the mask and every position is a step."""
    A, R = gae_row(r * m, v * m, np.ones(len(r)), gamma, lam)
    return A * m, R * m


def vtrace_row(r, v, m, rho, gamma, lam, rho_bar, c_bar, boot=0.0, done=None):
    T = len(r)
    vs, adv, acc = np.zeros(T), np.zeros(T), 0.0
    v_next = vs_next = float(boot)
    for t in range(T - 1, -1, -1):
        if not m[t]:
            continue
        going_on = 1.0 if done is None else 1.0 - float(done[t])
        p, c = min(rho_bar, rho[t]), lam * min(c_bar, rho[t])
        acc = p * (r[t] + gamma * going_on * v_next - v[t]) + gamma * going_on * c * acc
        adv[t] = p * (r[t] + gamma * going_on * vs_next - v[t])
        vs[t] = v[t] + acc
        v_next, vs_next = v[t], vs[t]
    return adv, vs


def retrace_row(r, v, q, m, rho, gamma, lam, c_bar, boot=0.0, done=None):
    """Q_ret_t = r_t + gamma (v' + c' (Q_ret' - q'))."""
    T = len(r)
    target, blended = np.zeros(T), float(boot)
    for t in range(T - 1, -1, -1):
        if m[t]:
            going_on = 1.0 if done is None else 1.0 - float(done[t])
            target[t] = r[t] + gamma * going_on * blended
            blended = v[t] + lam * min(c_bar, rho[t]) * (target[t] - q[t])
    return np.where(m, target - v, 0.0), target


def turn_gae_row(r, v, m, turns, gamma, lam, boot=0.0):
    """A turn is one step: rewards of its valid tokens summed, value of the first, advantage for all."""
    at = [t for t in range(len(r)) if m[t]]
    steps: list[list[int]] = []
    for t in at:
        if steps and turns[steps[-1][-1]] == turns[t]:
            steps[-1].append(t)
        else:
            steps.append([t])
    rk = np.array([sum(r[t] for t in s) for s in steps])
    vk = np.array([v[s[0]] for s in steps])
    a, ret = gae_row(rk, vk, np.ones(len(steps)), gamma, lam, boot)
    A, R = np.zeros(len(r)), np.zeros(len(r))
    for k, s in enumerate(steps):
        A[s], R[s] = a[k], ret[k]
    return A, R


def mean_var(x, ddof):
    n = len(x)
    mu = x.mean() if n else 0.0
    return mu, (((x - mu) ** 2).sum() / (n - ddof) if n > ddof else 0.0)


def factor(var, eps, mode):
    sd = np.sqrt(var)
    if mode == "threshold":
        return 1 / sd if sd > eps else 0.0
    return 1 / {"std_add": sd + eps, "var_add": np.sqrt(var + eps), "var_clamp": np.sqrt(max(var, eps))}[mode]


def whiten(x, m, ddof=1, eps=1e-8, mode="var_add"):
    x, m = np.asarray(x, np.float64), np.asarray(m, bool)
    mu, var = mean_var(x[m], ddof)
    return np.where(m, (x - mu) * factor(var, eps, mode), 0.0)


def group(rewards, gid, kind, *, ddof=1, eps=1e-6, mode="std_add", singleton="zero", lens=None, member=None):
    r, gid = np.asarray(rewards, np.float64), np.asarray(gid)
    member = np.isfinite(r) if member is None else np.asarray(member) & np.isfinite(r)
    out = np.zeros(len(r))
    share = member.sum() / max(1, np.count_nonzero(r[member]))
    for g in np.unique(gid):
        ix = np.where((gid == g) & member)[0]
        x, n = r[ix], len(ix)
        if n < 2:
            if n and singleton == "raw" and kind != "passk":
                out[ix] = x * (factor(1.0, eps, mode) if kind == "grpo" else share if kind == "gpg" else 1.0)
            continue
        mu, var = mean_var(x, ddof)
        if kind == "grpo":
            out[ix] = (x - mu) * factor(var, eps, mode) if np.ptp(x) else 0.0
        elif kind == "dr_grpo":
            out[ix] = x - mu
        elif kind == "rloo":
            out[ix] = x - (x.sum() - x) / (n - 1)
        elif kind == "opo":
            L = np.asarray(lens, np.float64)[ix]
            out[ix] = x - (L * x).sum() / L.sum()
        elif kind == "maxrl":
            out[ix] = (x - mu) / (mu + eps)
        elif kind == "passk":
            o = np.argsort(-x, kind="stable")
            out[ix[o[0]]] = (x[o[0]] - x[o[1]]) * factor(var, eps, mode) if x[o[0]] != x[o[1]] else 0.0
        elif kind == "gpg":
            out[ix] = (x - mu) * share
        else:
            raise ValueError(kind)
    return out


def otb(r, m, logp, sum_pi2, gid, eps=1e-8):
    """verl: G_t - sum_j G W / (sum_j W + eps) over the group at time t; W = running sum of 1 - 2 pi + sum pi^2."""
    B, T = r.shape
    G = np.array([returns_row(r[i], m[i], 1.0) for i in range(B)])
    W = np.cumsum((1 - 2 * np.exp(logp) + sum_pi2) * m, axis=1)
    A = np.zeros((B, T))
    for i in range(B):
        J = [j for j in range(B) if gid[j] == gid[i]]
        for t in range(T):
            base = 0.0
            if len(J) > 1:
                base = sum(G[j, t] * W[j, t] * m[j, t] for j in J) / (sum(W[j, t] * m[j, t] for j in J) + eps)
            A[i, t] = (G[i, t] - base) * m[i, t]
    return A, G


def nemo_grpo(rewards, gid, eps=1e-6):
    """NeMo-RL: mean and std (ddof 1) of the other members; a std of 0 does not divide."""
    r = np.asarray(rewards, np.float64)
    out = np.zeros(len(r))
    for i in range(len(r)):
        o = np.array([r[j] for j in range(len(r)) if gid[j] == gid[i] and j != i])
        if len(o):
            sd = o.std(ddof=1) if len(o) > 1 and np.ptp(o) else 0.0
            out[i] = (r[i] - o.mean()) / (sd + eps if sd > 0 else 1.0)
    return out


def tritonforge(rewards, gid, lo=0.0, hi=1.0, eps=1e-8):
    """TritonForge: members with lo <= r <= hi, population std; the others keep their raw reward."""
    r, gid = np.asarray(rewards, np.float64), np.asarray(gid)
    out = r.copy()
    for g in np.unique(gid):
        ix = np.where((gid == g) & (r >= lo) & (r <= hi))[0]
        if len(ix) and r[ix].any():
            mu, var = mean_var(r[ix], 0)
            out[ix] = 0.0 if np.sqrt(var) < eps else (r[ix] - mu) / (np.sqrt(var) + eps)
    return out
