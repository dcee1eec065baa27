//! nginx and HAProxy with the configurations of `deploy/`, in front of a server.

use std::fs;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::process::{Child, Command};

use super::{Client, Server, free_port, replace, wait_until};

const HAPROXY: &str = include_str!("../../../deploy/haproxy.cfg");
const NGINX: &str = include_str!("../../../deploy/nginx.conf");

/// A proxy that ends with the test.
pub struct Proxy {
    process: Child,
    pub address: SocketAddr,
}

impl Drop for Proxy {
    fn drop(&mut self) {
        // The parent of worker processes has to end them.
        let _ = Command::new("kill")
            .arg(self.process.id().to_string())
            .status();
        let _ = self.process.wait();
    }
}

/// A program that `make setup` puts in target/tools, or one that is installed.
pub fn tool(name: &str) -> Command {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent();
    let unpacked = target.expect("target").join("tools/bin").join(name);
    Command::new(if unpacked.exists() {
        unpacked
    } else {
        name.into()
    })
}

impl Proxy {
    /// With TLS, and the certificate of `certificate`.
    pub fn haproxy(server: &Server) -> Self {
        Self::haproxy_with(server, |config| config)
    }

    /// Without TLS, with short timeouts, and after other changes of its configuration.
    pub fn plain_haproxy(server: &Server, change: impl Fn(String) -> String) -> Self {
        Self::haproxy_with(server, |config| {
            let config = replace(&config, " ssl crt plants.pem alpn h2,http/1.1", "");
            let config = replace(&config, "request 10s", "request 1s");
            change(replace(&config, "client 60s", "client 1s"))
        })
    }

    fn haproxy_with(server: &Server, change: impl Fn(String) -> String) -> Self {
        let port = free_port();
        let config = replace(HAPROXY, "bind :443", &format!("bind 127.0.0.1:{port}"));
        let config = replace(&config, "/etc/haproxy/plants.pem", "plants.pem");
        let config = replace(&config, "127.0.0.1:8080", &server.address().to_string());
        let ops_port = format!("port {}", server.ops_address().port());
        let config = change(replace(&config, "port 9090", &ops_port));
        let name = format!("haproxy-{port}.cfg");
        fs::write(server.directory().join(&name), config).expect("a file");
        let mut command = tool("haproxy");
        command.args(["-db", "-q", "-f", &name]);
        Self::start(command, port, server)
    }

    pub fn nginx(server: &Server) -> Self {
        Self::nginx_with(server, |config| config)
    }

    pub fn plain_nginx(server: &Server) -> Self {
        Self::nginx_with(server, |config| {
            let config = replace(&config, " ssl;", ";");
            let config = replace(&config, "_timeout 10s", "_timeout 1s");
            let config = replace(&config, "_timeout 30s", "_timeout 1s");
            let is_tls = |line: &&str| !line.contains("ssl_certificate");
            config.split_inclusive('\n').filter(is_tls).collect()
        })
    }

    fn nginx_with(server: &Server, change: impl Fn(String) -> String) -> Self {
        let port = free_port();
        let directory = server.directory().to_str().expect("UTF-8");
        let config = replace(NGINX, "listen 443", &format!("listen 127.0.0.1:{port}"));
        let config = replace(&config, "/etc/ssl/plants/", &format!("{directory}/"));
        let config = change(replace(
            &config,
            "127.0.0.1:8080",
            &server.address().to_string(),
        ));
        let config = format!(
            "daemon off; pid nginx-{port}.pid; error_log stderr; events {{}}\n\
             http {{ access_log off; client_body_temp_path body; proxy_temp_path proxy; fastcgi_temp_path fastcgi;\n\
             uwsgi_temp_path uwsgi; scgi_temp_path scgi;\n{config}}}\n"
        );
        let name = format!("nginx-{port}.conf");
        fs::write(server.directory().join(&name), config).expect("a file");
        let mut command = tool("nginx");
        command.args(["-p", directory, "-c", &name, "-e", "stderr"]);
        Self::start(command, port, server)
    }

    fn start(mut command: Command, port: u16, server: &Server) -> Self {
        let program = command.get_program().display().to_string();
        let process = command.current_dir(server.directory()).spawn();
        let process = process.unwrap_or_else(|_| panic!("{program}; `make setup` installs it"));
        let address = (Ipv4Addr::LOCALHOST, port).into();
        let proxy = Self { process, address };
        wait_until("the proxy listens", || Client::try_connect(address).is_ok());
        proxy
    }
}
