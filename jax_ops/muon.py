"""Muon (https://kellerjordan.github.io/posts/muon): the update of a matrix is its momentum, made
nearly orthogonal. M matrices of the same shape are computed together, [M, I, O].

For one matrix, the plain equivalent of `orthogonalize` is u, _, v = jnp.linalg.svd(x, False), and
0.2 * max(x.shape)**0.5 * u @ v."""
import jax
import jax.numpy as jnp
import optax
from flax.traverse_util import flatten_dict, unflatten_dict

from jax_ops.sharding import batch_axes, shard

# (a, b, c, d, e) of the polynomials x -> a x + b x^3 + c x^5 + d x^7 + e x^9, applied one after the
# other. Each brings singular values, at first in [0.003, 1], as close to 1 as its degree can
# (arXiv:2505.16932), the last one to [0.55, 1.45]
POLAR_EXPRESS = (
    (14.8009, -144.4595, 480.2614, -617.0302, 268.3830),
    (6.4106, -15.3546, 13.0939, -4.3580, 0.4929),
    (2.0034, -0.5702, 0, 0, 0))


@optax.stateless
def orthogonalize(updates, params=None):
    """Replaces every matrix in the tree `updates`. A matrix with the singular value decomposition
    U S V^T becomes about U V^T, times the factor 0.2 sqrt(longer side).

    The factor gives the result the size of AdamW's updates (arXiv:2502.16982). A leaf [E, I, O]
    holds E matrices. c_attn holds three matrices, q, k and v. Each matrix is orthogonalized by
    itself."""
    apart = split_qkv(updates)
    orthogonal = map_stacked_by_shape(orthogonalize_stack, apart)
    return join_qkv(orthogonal)


def orthogonalize_stack(x_MxIxO):
    """Orthogonalizes M matrices of one shape, and multiplies them by 0.2 sqrt(longer side).

    On a mesh with n batch shards, each shard computes M / n of the matrices. If n does not divide
    M, each shard computes all."""
    x_MxIxO = shard(x_MxIxO, batch_axes(len(x_MxIxO)), None, None)
    n_rows, n_columns = x_MxIxO.shape[1:]
    if n_rows > n_columns:
        x_MxIxO = polar_express_gram(x_MxIxO.swapaxes(1, 2)).swapaxes(1, 2)
    elif n_rows < n_columns:
        x_MxIxO = polar_express_gram(x_MxIxO)
    else:
        x_MxIxO = polar_express(x_MxIxO)
    return 0.2 * max(n_rows, n_columns)**0.5 * x_MxIxO


def polar_express(x_MxIxO):
    """Brings the singular values of M matrices close to 1, by the polynomials of POLAR_EXPRESS."""
    x_MxIxO, gram_MxIxI = normalize(x_MxIxO)
    for coefficients in POLAR_EXPRESS:
        x_MxIxO = matmul_f32(even_polynomial(gram_MxIxI, coefficients), x_MxIxO)
        gram_MxIxI = matmul_f32(x_MxIxO, x_MxIxO.swapaxes(1, 2))
    return x_MxIxO


def polar_express_gram(x_MxIxO):
    """Computes polar_express of wide matrices, I < O, multiplying by x only at the beginning and
    the end.

    In between it computes only with matrices [I, I]. To apply a polynomial of POLAR_EXPRESS is to
    multiply x by a matrix [I, I], which even_polynomial computes from the Gram matrix x x^T. This
    function multiplies the matrices of all polynomials with each other, updates the Gram matrix
    after each polynomial, and multiplies x by the product at the end. The Gram matrix holds the
    squares of the singular values, so all matmuls are in float32
    (docs/lab_log.md#muon-in-three-steps)."""
    x_MxIxO, gram_MxIxI = normalize(x_MxIxO)
    product_MxIxI = None
    for coefficients in POLAR_EXPRESS:
        factor_MxIxI = even_polynomial(gram_MxIxI, coefficients)
        if product_MxIxI is None:
            product_MxIxI = factor_MxIxI
        else:
            product_MxIxI = matmul_f32(factor_MxIxI, product_MxIxI)
        gram_MxIxI = matmul_f32(matmul_f32(factor_MxIxI, gram_MxIxI), factor_MxIxI)
    return matmul_f32(product_MxIxI, x_MxIxO)


def normalize(x_MxIxO):
    """Divides each of M matrices x by the square root of the Frobenius norm of x x^T, an upper
    bound of the largest singular value of x. Returns (x; x x^T), where x is the matrices after the
    division."""
    gram_MxIxI = matmul_f32(x_MxIxO, x_MxIxO.swapaxes(1, 2))
    norm = jnp.linalg.norm(gram_MxIxI, axis=(1, 2), keepdims=True) + 1e-16
    return x_MxIxO / jnp.sqrt(norm), gram_MxIxI / norm


def even_polynomial(gram_MxIxI, coefficients):
    """Computes p = a I + b g + c g^2 + d g^3 + e g^4 for each Gram matrix g = x x^T. The matrix p x
    has the same singular vectors as x, and the singular value a s + b s^3 + c s^5 + d s^7 + e s^9
    for each singular value s of x.

    coefficients: (a, b, c, d, e), an element of POLAR_EXPRESS. If c is 0, d and e must be 0, too:
    p is then a I + b g, which takes no matmuls."""
    a, b, c, d, e = coefficients
    result_MxIxI = a * jnp.eye(gram_MxIxI.shape[-1]) + b * gram_MxIxI
    if c:
        square_MxIxI = matmul_f32(gram_MxIxI, gram_MxIxI)
        last_terms_MxIxI = matmul_f32(square_MxIxI, d * gram_MxIxI + e * square_MxIxI)
        result_MxIxI += c * square_MxIxI + last_terms_MxIxI
    return result_MxIxI


def matmul_f32(a, b):
    """Computes a @ b in float32, also on GPUs and TPUs."""
    return jnp.matmul(a, b, precision='highest')


def map_stacked_by_shape(f, tree):
    """Applies f to the matrices of a tree, stacked by shape. Returns a tree like `tree`, with the
    same dtypes.

    f: a function of float32 [M, I, O] that returns the same shape. A leaf may hold several
    matrices, [..., I, O]."""
    leaves, structure = jax.tree.flatten(tree)
    indices_of = {}  # by shape
    for i, leaf in enumerate(leaves):
        indices_of.setdefault(leaf.shape, []).append(i)
    for shape, indices in indices_of.items():
        stacked = jnp.stack([leaves[i] for i in indices]).astype(jnp.float32)
        results = f(stacked.reshape(-1, *shape[-2:])).reshape(-1, *shape)
        for i, result in zip(indices, results):
            leaves[i] = result.astype(leaves[i].dtype)
    return jax.tree.unflatten(structure, leaves)


def split_qkv(tree):
    """Returns the tree with a list [q, k, v] in place of each c_attn kernel [D, (H + 2 G) K].

    Muon then orthogonalizes q, k and v separately. Orthogonalized as one matrix, they gave a loss
    that was 11% higher with two of three seeds (docs/lab_log.md#the-recipe-part-by-part)."""
    flat = flatten_dict(tree)
    for path, kernel in flat.items():
        if path[-2:] == ('c_attn', 'kernel'):
            n_query = flat[*path[:-2], 'c_proj', 'kernel'].shape[0]
            end_of_keys = (n_query + kernel.shape[1]) // 2
            flat[path] = jnp.split(kernel, [n_query, end_of_keys], axis=1)
    return unflatten_dict(flat)


def join_qkv(tree):
    """Undoes split_qkv."""
    def join(leaf):
        return jnp.concatenate(leaf, axis=1) if isinstance(leaf, list) else leaf

    return jax.tree.map(join, tree, is_leaf=lambda node: isinstance(node, list))
