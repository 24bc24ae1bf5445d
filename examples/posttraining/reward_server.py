"""A server of rewards: an answer is worth 1 if it ends with that of the prompt's line.

python examples/posttraining/reward_server.py 8000 &
petatron posttrain grpo MODEL_FOLDER --rollout-prompts prompts.jsonl --rewards http://localhost:8000
"""

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Rewards(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        jobs = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        rewards = [float(job["answer"].strip().endswith(job["record"]["answer"])) for job in jobs]
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(rewards).encode())


if __name__ == "__main__":
    ThreadingHTTPServer(("localhost", int(sys.argv[1])), Rewards).serve_forever()
