"""Answer a folder of images on a Ray cluster, with the words of `undrift predict`. pip install undrift ray

python ray_predict.py 8 /data/images --weights /data/net.safetensors --out /data/answers.csv

Eight tasks share the parts of the images. If a worker dies, Ray starts its task again, which takes what is left: the
file is that of one process, byte for byte. All machines see the paths.
"""

import sys

import ray

from undrift.cli import main

RESTARTS = 3  # of each task; an image that kills the process must not do so for ever


@ray.remote(max_retries=RESTARTS)
def work(words: list[str]) -> None:
    if code := main(["predict", *words]):  # it has said why
        raise RuntimeError(f"undrift predict ended with {code}")


def predict(tasks: int, words: list[str], **resources: float) -> None:
    """Run so many tasks until all images are answered; `num_gpus=1` gives each a GPU."""
    parts = [] if "--parts" in words else ["--parts", str(8 * tasks)]
    ray.get([work.options(**resources).remote([*words, *parts]) for _ in range(tasks)])


if __name__ == "__main__":
    ray.init()
    predict(int(sys.argv[1]), sys.argv[2:])
