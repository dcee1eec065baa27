"""Adds a plant with httpx: with_httpx.py URL CA TOKEN BODY. Prints what the client sees."""

import json
import ssl
import sys

import httpx

url, ca, token, body = sys.argv[1:]
headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
with httpx.Client(http2=True, verify=ssl.create_default_context(cafile=ca), trust_env=False) as client:
    response = client.post(url, headers=headers, content=body)
    connection = response.extensions["network_stream"].get_extra_info("ssl_object")
    seen = {"status": response.status_code, "body": response.text, "http": response.http_version, "tls": connection.version()}
print(json.dumps(seen))
