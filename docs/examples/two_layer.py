"""The two-layer network of docs/architecture.md section 4: named dimensions, gradients, one SPMD program, one State.

    python docs/examples/two_layer.py                                  four simulated ranks in this process
    mesh-mpi launch -n 4 -- docs/examples/two_layer.py                 four MPI ranks; the same losses

Prints the program and the loss of every tenth step.
"""

import numpy as np

import mesh_mpi as mm
from mesh_mpi.log import is_speaker

batch, d_model, d_ff = mm.Dimension("batch", 64), mm.Dimension("d_model", 512), mm.Dimension("d_ff", 2048)
x = mm.placeholder("x", [batch, d_model])
w = mm.Variable("w", [d_model, d_ff], init=mm.normal(stddev=0.04))
v = mm.Variable("v", [d_ff, d_model], init=mm.normal(stddev=0.02))
y = mm.einsum([mm.relu(mm.einsum([x, w], [batch, d_ff])), v], [batch, d_model])
loss = mm.reduce_mean(mm.square(y - x))
dw, dv = mm.gradients(loss, [w, v])

rate = 2.0  # large, because the loss is a mean over 32,768 numbers and its gradient small
step = mm.compile(outputs={"loss": loss}, updates=[(w, w - rate * dw), (v, v - rate * dv)],
                  mesh_shape="data:2;model:2", layout="batch:data;d_ff:model")
state = mm.State([step], seed=0)

if __name__ == "__main__":
    array = np.random.default_rng(0).standard_normal((64, 512)).astype(np.float32)
    if is_speaker():
        print(step.listing())
    for i in range(1, 51):
        value = state.run(step, x=array)["loss"]
        if is_speaker() and i % 10 == 0:
            print(f"step {i:3d}  loss {value:.6f}")
