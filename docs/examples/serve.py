"""Fine-tune a network on your photographs, and answer requests with it.

pip install 'effloop[examples]'
python serve.py experiment=finetune data.root=/data/pets
curl --data-binary @cat.jpg http://127.0.0.1:8000/predict
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi.concurrency import run_in_threadpool

import effloop
from effloop.errors import DataError

RUN = Path("outputs/served")


def trained(overrides: list[str]) -> Any:
    """The network of the run `outputs/served`, which is trained first if it isn't there."""
    if not (RUN / "summary.json").exists():
        effloop.build_trainer(effloop.compose([*overrides, "run=served"])).fit()
    return effloop.load(RUN)


def application(model: Any) -> FastAPI:
    """POST the bytes of an image to /predict: the three most probable classes come back."""
    app = FastAPI(title="What is in the photograph?")

    @app.post("/predict")
    async def predict(request: Request) -> dict[str, Any]:
        image = await request.body()
        try:  # in a thread, so that other requests are accepted meanwhile
            [answer] = await run_in_threadpool(model.predict, [image], top=3)
        except DataError as error:
            raise HTTPException(422, str(error)) from None
        return answer

    return app


if __name__ == "__main__":
    uvicorn.run(application(trained(sys.argv[1:])), port=8000)
