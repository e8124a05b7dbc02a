import kvstore_plugin as mykv  # before mxnet, which needs it with numpy 2
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

mx.npx.set_np()  # arrays that MXNet 1.9.1 and 2.0.0b1 both understand
mykv.init()
inputs = np.random.RandomState(0).rand(4096, 10).astype("float32")
dataset = gluon.data.ArrayDataset(inputs, inputs.argmax(axis=1).astype("int32"))  # which number is the largest?
sampler = mykv.DistributedSampler(len(dataset))  # each worker its share, shuffled
data = gluon.data.DataLoader(dataset, batch_size=32, sampler=sampler)

net = gluon.nn.HybridSequential()
net.add(gluon.nn.Dense(64, activation="relu"), gluon.nn.Dense(10))
net.initialize()
trainer = mykv.DistributedTrainer(net.collect_params(), "adam", {"learning_rate": 0.02})
loss_of = gluon.loss.SoftmaxCrossEntropyLoss()

for epoch in range(3):
    sampler.set_epoch(epoch)  # another order in each epoch
    losses = []
    for numbers, labels in data:
        with autograd.record():
            loss = loss_of(net(numbers), labels)
        loss.backward()
        trainer.step(len(numbers))  # gradients are means over all workers
        losses.append(loss.mean())
    mean = mykv.allreduce(sum(losses) / len(losses), name="loss")  # a call of all workers
    if mykv.rank() == 0:
        print(f"epoch {epoch}: loss {float(mean):.3f}, rank 0 of {mykv.size()}")
mx.nd.waitall()  # an error of the last step is raised here, and not when the file is open
if mykv.rank() == 0:
    net.save_parameters("net.params")
